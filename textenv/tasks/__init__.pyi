from .builtin import make_task as make_task
