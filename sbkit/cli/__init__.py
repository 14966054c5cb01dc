"""What commands share: their parser, their options, and tables of clips."""
