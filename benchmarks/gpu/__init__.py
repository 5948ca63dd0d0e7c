"""What a machine with a CUDA device shows in minutes: the parts of its report."""
