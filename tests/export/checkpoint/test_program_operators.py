import pytest

from aftexport.checkpoint.program_operators import is_allowed


@pytest.mark.parametrize(
    "target",
    """
    torch.load torch.save torch.hub.load torch.os.system torch.compile torch.classes.load_library
    torch.ops.load_library torch.ops.aten.from_file.default torch.ops.aten.from_file.out
    torch.ops.aten.save.default torch.ops.aten.set_.source_Storage torch.ops.aten.resize_.default
    torch.ops.aten.add.out torch.ops.aten.add torch.ops.aten.add.Tensor.__call__
    torch.ops.aten.add.__class__ torch.ops.aten.__class__.__init__ torch.ops.aten.warn.default
    torch.ops.aten._print.default torch.ops.aten.linalg_inv.out torch.ops.aten.fft_fft.out
    torch.ops.aten._sparse_coo_tensor_unsafe.default torch.ops.aten.manual_seed.default
    torch.ops.aten.fbgemm_pack_quantized_matrix.default torch.ops.aten.absent.default
    torch.ops.prims.copy_to.default torch.ops.prim.Print.default
    torch.ops.inductor.resize_storage_bytes_.default
    torch.ops.quantized.linear_unpack.default torch.ops.mkldnn._convolution_pointwise.default
    torch.ops.profiler._record_function_enter_new.default torch.ops.c10d.barrier.default
    torch.ops.rngprims.philox_rand.default torch.ops.aftexport.absent.default
    torch.ops.higher_order.call_torchbind torch.ops.higher_order.triton_kernel_wrapper_mutation
    torch.ops.higher_order.print torch.ops.higher_order.with_effects
    torch._C._jit_set_profiling_mode
    torchvision.io.write_file torch2.os.system torch.aten.add.Tensor
    _operator.methodcaller _operator.attrgetter _operator.call _operator.setitem _operator.pow
    _operator.lshift _operator_.add operator.add math.factorial math.pow math.__loader__
    builtins.exec builtins.open os.system print #aten:add
    """.split(),  # noqa: SIM905
)
def test_unlisted_target_is_refused(target: str) -> None:
    assert not is_allowed(target)


@pytest.mark.parametrize(
    "target",
    """
    torch.ops.aten.add.Tensor torch.ops.aten.add_.Tensor torch.ops.aten.masked_fill_.Scalar
    torch.ops.aten.copy_.default torch.ops.aten.__iand__.Tensor torch.ops.aten.sym_size.int
    torch.ops.aten.batch_norm.default torch.ops.aten.linalg_vector_norm.default
    torch.ops.aten.scaled_dot_product_attention.default torch.ops.aten.special_expit.default
    torch.ops.aten._native_batch_norm_legit_no_training.default torch.ops.aten.index_put_.default
    torch.ops.aftexport.aft_simple.default torch.ops.higher_order.cond torch.sym_max
    torch.ops.higher_order.wrap_with_autocast _operator.floordiv math.trunc
    """.split(),  # noqa: SIM905
)
def test_a_listed_target_is_allowed(target: str) -> None:
    assert is_allowed(target)
