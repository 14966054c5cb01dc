"""The tasks of sbkit: of each, all that its bundles need, in one folder."""
