"""The command ``aftexport fuse IN.onnx OUT.onnx``."""

from pathlib import Path

from rich.console import Console

from aftexport.system.arguments import make_parser

_EPILOG = """\
The command recognizes AFT-full, AFT-local, AFT-simple, AFT-conv, Efficient Attention,
Fastformer and linear attention, and the causal forms of AFT and linear attention. The way in
which the graph is written does not matter. A replacement must equal the original in float64
on ordinary and adversarial inputs. Near misses are listed with the condition that failed.
LinearAttention and CausalConvWithState, of ONNX (opset 27) or ONNX Runtime, are replaced too.
The operators carry fallbacks, so the file runs wherever the original ran, and faster
if the fused kernels are installed.

  aftexport fuse model.onnx fused.onnx --report fused.json

Exit status:
  0  the file was written; if nothing was recognized, it is a copy
  1  the outputs differ; nothing was written
  2  the input is invalid; nothing was written
"""


def run(words: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = make_parser(
        "aftexport fuse",
        "Replace the linear attention in any ONNX model by fused operators.",
        _EPILOG,
    )
    add = parser.add_argument
    add("source", type=Path, metavar="IN", help="an ONNX model of up to 2 GiB")
    add("target", type=Path, metavar="OUT", help="path of the resulting ONNX model")
    add("--report", type=Path, metavar="FILE",
        help="write the replacements and near misses to FILE in JSON")  # fmt: skip
    options = parser.parse_args(words)

    from aftexport.bundle.output_path import check_can_be_made, check_reports
    from aftexport.recognition.onnx_file import fuse_file
    from aftexport.recognition.result import show_recognition, write_report
    from aftexport.system.console import escape, stage

    check_reports({"--report": options.report}, (options.source, options.target))
    check_can_be_made("OUT", options.target)
    console = Console(emoji=False)
    with stage(console, f"Examining {options.source}") as progress:
        recognition = fuse_file(options.source, options.target, progress)
    show_recognition(recognition, console)
    if options.report is not None:
        write_report(options.report, recognition)
    console.print(f"Model: [bold]{escape(str(options.target))}[/]", soft_wrap=True)
    return 0
