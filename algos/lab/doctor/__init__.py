"""The run doctor: says in words what is wrong with a training, with the figure and what to do."""
