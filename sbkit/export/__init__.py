"""Export runs as bundles and other formats, each compared with the trained model."""
