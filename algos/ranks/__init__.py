"""Training in several processes: ranks, their collective operations, and models whose weights are sharded over them."""
