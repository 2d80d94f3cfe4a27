"""Where torchtitan 0.2.2 is wrapped so that its models train with the attention of a job."""
