"""Read YAML files, override, resolve and check their values, and build their objects."""
