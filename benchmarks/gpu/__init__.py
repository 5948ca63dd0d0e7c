"""Parts of the GPU report, which take minutes on a machine with a CUDA device."""
