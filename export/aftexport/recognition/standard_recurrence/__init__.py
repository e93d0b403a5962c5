"""The recurrent operators of other domains, read into the operators of ``ai.aftexport``.

ONNX has ``LinearAttention`` and ``CausalConvWithState`` since opset 27, and ONNX Runtime has both
in ``com.microsoft``. ``aftexport.recognition.standard_file`` writes our operators as the standard
ones.

    node_values    a node: its attributes, sizes and errors; the lengths that other operators lack
    translation    all nodes of a graph as operators of ours
    expansion      the standard nodes as the function bodies of onnx, which any runtime runs
"""
