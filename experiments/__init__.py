"""Studies of training: the evidence behind the pages, a folder for each with its results."""
