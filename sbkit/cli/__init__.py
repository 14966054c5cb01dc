"""The parser, the options and the tables of clips that commands share."""
