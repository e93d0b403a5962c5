"""Rewrites of exported graphs into operators of the domain.

Built on onnx_ir, which torch.onnx hands over and whose passes normalise a graph before it is read.
A second graph library, onnx-graphsurgeon, would mean every rewrite in two ways; and patterns of
nodes, as onnxscript's rewriter matches them, would need one for every way to write a formula.

``recognition`` finds the mechanisms in other people's graphs:

    normalise    constants folded, functions inlined (libraries do it)
    measured     the graph is run at several sizes: shapes, and which axes are dynamic
    no_ops       nodes that do nothing are removed; ``cuts`` are those that may do something
    reading      a value as a formula over named axes; ``formulas`` has each ONNX operator's, of
                 the ``atoms`` there are, up to a ``horizon`` ...
    algebra      ... in a normal form that no longer knows how it was written; ``windows`` too;
                 equal formulas have equal ``keys``
    mechanisms   a pattern for each, held against formulas less their ``outside_factors``;
                 ``pattern``, ``elementwise``, ``tokens`` and ``channels`` have what they share
    failed_conditions  why any other weighted sum is not a mechanism
    writing      the operator, and the layout it asks for, as nodes
    proof        original and rewrite in float64, on inputs meant to tell them apart

``encoder`` and ``fastformer`` fuse what surrounds the mechanisms in any graph.
"""
