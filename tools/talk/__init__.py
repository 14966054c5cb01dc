"""A conversation by voice, built on the public parts of sbkit: an application to start from."""
