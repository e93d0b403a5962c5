"""Flow control between a client's socket, the parser and the application."""

from aftserve.http.uvicorn_internals import FlowControl


class ReadFlow(FlowControl):
    """Flow control that also stops reading while earlier bytes are not parsed."""

    _paused_by_application = _paused_by_parser = False

    def pause_reading(self) -> None:
        """Stop reading for the application."""
        self._paused_by_application = True
        super().pause_reading()

    def resume_reading(self) -> None:
        """Resume reading for the application, unless the parser has unparsed bytes."""
        self._paused_by_application = False
        self.pause_for_parser(self._paused_by_parser)

    def pause_for_parser(self, paused: bool) -> None:
        """Stop reading, or resume unless the application has stopped it too."""
        self._paused_by_parser = paused
        if paused:
            super().pause_reading()
        elif not self._paused_by_application:
            super().resume_reading()
