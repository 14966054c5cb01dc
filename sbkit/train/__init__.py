"""Training: the setup of a run, the Brain, one exact step, and what stops and resumes a run."""
