"""Audio: files, resampling, segments, features, augmentation, and the codes of a codec."""
