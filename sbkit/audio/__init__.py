"""Audio: files, resampling, segments, features and augmentation."""
