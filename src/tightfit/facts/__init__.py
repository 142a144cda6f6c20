"""What is given: the model, the machine, the job. Imports no torch."""
