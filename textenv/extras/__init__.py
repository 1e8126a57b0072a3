"""What not all users need: adapters to other packages and services, each a file or folder of its own."""
