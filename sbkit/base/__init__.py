"""The ground floor: errors, files, units, ranges of values, and the machine."""
