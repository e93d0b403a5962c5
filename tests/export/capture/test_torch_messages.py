import logging
import sys
import warnings

import pytest

from aftexport.capture.torch_messages import quiet


def say(name: str) -> None:
    logging.getLogger(name).critical("a traceback")
    logging.getLogger(name + ".new").error("another")
    print("a graph", file=sys.stderr)
    warnings.warn("deprecated", FutureWarning, stacklevel=1)


@pytest.mark.parametrize(
    "name",
    ["torch", "torch._guards", "torch.fx.experimental.symbolic_shapes", "torch._dynamo", "onnx_ir"],
)
def test_quiet_keeps_back_torch(
    name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    handler = logging.StreamHandler()
    logging.getLogger(name).addHandler(handler)
    try:
        with quiet():
            say(name)
            logging.getLogger("own").warning("of others")
        assert capsys.readouterr().err == ""
        assert caplog.messages == ["of others"]
        with pytest.warns(FutureWarning):
            say(name)
        assert "a graph" in capsys.readouterr().err
    finally:
        logging.getLogger(name).removeHandler(handler)
