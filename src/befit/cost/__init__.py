"""What a run will take, from shapes alone."""
