"""What only makes control faster; every path here has a plain one."""
