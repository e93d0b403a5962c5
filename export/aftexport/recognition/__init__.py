"""Find mechanisms in the ONNX graphs of others and replace each by one operator of the domain.

The stages, in order:

    graph      ``normalize`` folds constants, inlines functions and removes nodes without effect.
               ``shape_probe`` runs the graph at several sizes, which shows all shapes and the
               dynamic axes.
    read       Each value is read as a formula over named axes, up to a horizon.
    algebra    Formulas of ``terms`` get a normal form that does not show how they were written, so
               that equal formulas have equal keys.
    patterns   One pattern for each mechanism is held against formulas without outside
               factors. A near miss raises ``NearMissFound`` with the reason.
    writer     The operator, and the layout of its inputs as nodes.
    comparison Original and rewrite are compared in float64 on adversarial inputs.

``recognizer`` runs them for each value, last values first, and returns a ``result``. At the end,
``projections`` folds transposes into the convolutions beside the operators. ``failed_conditions``
explains why any other weighted sum is not a mechanism. A value without a formula raises
``Unreadable``, the one exception that is caught across stages.

Everything is built on onnx_ir, which torch.onnx returns and whose passes normalize a graph. With
patterns of nodes, as in onnxscript's rewriter, each way to write a formula would need its own.
"""
