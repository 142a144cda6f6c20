"""From a model, a machine and a job to the fastest plan that fits, with reasons."""
