"""`PipeConsole`: rich's console for programs whose output may go into a pipe. Imported where something is shown."""

from rich.console import Console


class PipeConsole(Console):
    """Console that raises a BrokenPipeError when nobody reads its pipe; rich would end the program and its stdout."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled."""
        raise  # noqa: PLE0704
