"""Training: the setup of a run, the Brain, one exact step, and how a run stops and resumes."""
