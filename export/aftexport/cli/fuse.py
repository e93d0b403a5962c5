"""``aftexport fuse IN.onnx OUT.onnx``."""

from pathlib import Path

from rich.console import Console

from aftexport.system.arguments import make_parser

_EPILOG = """\
Recognised, however they are written: AFT-full, AFT-local, AFT-simple, AFT-conv, Efficient
Attention, Fastformer and linear attention, and causal forms of AFT and linear attention.
Each is replaced only once original and operator were equal in float64 on ordinary and
adversarial inputs; what nearly was one is listed with the condition that failed. The operators
carry portable bodies, so the file runs wherever the original did, and faster where the kernels
are.

  aftexport fuse model.onnx fused.onnx --report fused.json

Exit status: 0 done, also where nothing was recognised and the file was copied;
1 outputs differ, nothing written; 2 bad input, nothing written.
"""


def run(words: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = make_parser(
        "aftexport fuse",
        "Make operators of the linear attention in any ONNX model.",
        _EPILOG,
    )
    add = parser.add_argument
    add("source", type=Path, metavar="IN", help="an ONNX model of up to 2 GiB")
    add("target", type=Path, metavar="OUT", help="where the result goes")
    add("--report", type=Path, metavar="FILE", help="write what was found there, in JSON")
    options = parser.parse_args(words)

    from aftexport.bundle.output_path import check_can_be_made, check_reports
    from aftexport.console import escape, stage
    from aftexport.recognition.onnx_file import fuse_file
    from aftexport.recognition.report import show_recognition, write_report
    from aftexport.system.files import is_device

    check_reports({"--report": options.report}, (options.source, options.target))
    if not is_device(options.target):
        check_can_be_made("OUT", options.target)
    console = Console(emoji=False)
    with stage(console, f"Examining {options.source}") as progress:
        found = fuse_file(options.source, options.target, progress)
    show_recognition(found, console)
    if options.report is not None:
        write_report(options.report, found)
    console.print(f"Model: [bold]{escape(str(options.target))}[/]", soft_wrap=True)
    return 0
