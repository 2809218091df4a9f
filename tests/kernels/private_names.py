"""Names of torch and Triton that are private or undocumented, and what each is used for.

Any version may lack one or change it. Gluon's are in `dilabench.kernels.gluon_names`.
"""

from collections.abc import Mapping

PRIVATE: Mapping[str, str] = {
    "torch.Tensor._is_zerotensor": "zero tensors are copied before raw memory is read",
    "torch.UntypedStorage._cdata": "whether two tensors share memory",
    "torch._C.TensorBase": "verification: whether a call changed it",
    "torch._C._are_functorch_transforms_active": "a call under torch.func becomes an operator",
    "torch._C._autograd._profiler_enabled": "parts of a computation are named in a profile",
    "torch._C._distributed_c10d.FileStore": "ranks meet",
    "torch._C._distributed_c10d.PrefixStore": "ranks meet",
    "torch._C._distributed_c10d.Store": "ranks meet",
    "torch._C._distributed_c10d.TCPStore": "ranks meet",
    "torch._C._functorch.is_batchedtensor": "batches of indices are refused",
    "torch._C._functorch.is_legacy_batchedtensor": "batches of gradients",
    "torch._C._is_any_autocast_enabled": "whether to cast as autocast does",
    "torch._C._is_tracing": "a call under torch.jit.trace becomes an operator",
    "torch._C._len_torch_dispatch_stack": "a call under modes becomes an operator",
    "torch._C._len_torch_function_stack": "verification: whether a call changed it",
    "torch._C._set_grad_enabled": "verification: whether a call changed it",
    "torch._dynamo.config.accumulated_recompile_limit": "the benchmark compiles every requested shape",
    "torch._dynamo.config.recompile_limit": "how many packings torch compiles",
    "torch._dynamo.exc.TorchDynamoException": "the benchmark prints why a call did not compile",
    "torch._dynamo.utils.counters": "the benchmark counts graph breaks",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "memory is traced",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "memory is traced",
    "torch._subclasses.fake_tensor.FakeTensor": "memory is traced",
    "torch._subclasses.fake_tensor.FakeTensorMode": "memory is traced",
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager": "memory is traced",
    "torch.autograd.forward_ad._current_level": "forward-mode derivatives are refused",
    "torch.cpu._is_amx_tile_supported": "which of torch's kernels is fast on a CPU",
    "torch.cuda._sleep": "launches are timed behind a kernel that waits",
    "torch.distributed.ProcessGroup._get_backend": "how long a group's operations wait",
    "torch.distributed._symmetric_memory.empty": "messages by copy engines",
    "torch.distributed._symmetric_memory.rendezvous": "messages by copy engines",
    "torch.distributed.distributed_c10d._get_default_store": "ranks take one way",
    "torch.distributed.tensor.experimental._context_parallel._cp_options.enable_load_balance": "torch's ring",
    "torch.distributed.tensor.experimental._context_parallel._enable_context_parallel_dispatcher": "torch's ring",
    "torch.distributed.tensor.experimental._context_parallel.set_rotate_method": "torch's ring",
    "torch.ops.aten._efficient_attention_backward": "a kernel with its lse",
    "torch.ops.aten._efficient_attention_forward": "a kernel with its lse",
    "torch.ops.aten._flash_attention_backward": "a kernel with its lse",
    "torch.ops.aten._flash_attention_forward": "a kernel with its lse",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": "a kernel with its lse",
    "torch.ops.aten._scaled_dot_product_cudnn_attention_backward": "a kernel with its lse",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default": "a kernel with its lse",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default": "a kernel with its lse",
    "torch.ops.aten._to_copy": "memory is traced",
    "torch.ops.aten.add.Tensor._schema": "memory is traced",
    "torch.ops.mkldnn._is_mkldnn_fp16_supported": "which of torch's kernels is fast on a CPU",
    "torch.utils._python_dispatch.TorchDispatchMode": "memory is traced",
    "torch.overrides._pop_mode": "verification: whether a call changed it",
    "torch.utils._python_dispatch._pop_mode": "verification: whether a call changed it",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "FLOPs are counted by modes that are on already",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "memory is traced",
    "torch.utils._pytree.tree_leaves": "memory is traced",
    "torch.utils._pytree.tree_map": "memory is traced",
    "triton.AsyncCompileMode": "kernels are compiled side by side; without it one after another",
    "triton.JITFunction": "launches",
    "triton.TritonError": "launches that fail to compile",
    "triton._C.libtriton.ir.DESCRIPTOR_REDUCE_KIND.ADD": "the Hopper kernels",
    "triton.backends.nvidia.compiler.CUDAOptions": "products of float32 on tensor cores; without it by FMA",
    "triton.compiler.CompiledKernel": "launches that repeat",
    "triton.knobs.runtime": "launches that repeat",
    "triton.language.semantic.TritonSemantic._convert_to_ir_values": "the Hopper kernels",
    "triton.runtime.JITFunction": "launches",
    "triton.runtime.driver.active.get_current_stream": "launches that repeat",
    "triton.runtime.errors.OutOfResources": "launches that fail to compile",
    "triton.runtime.jit.JITFunction": "memory is traced",
    "triton.tools.tensor_descriptor.TensorDescriptor": "the fused and block-sparse kernels; without it torch's",
}
# Without an underscore, and in no documentation.
UNDOCUMENTED: Mapping[str, str] = {
    "torch.distributed.ProcessGroup.bound_device_id": "the device of a group",
    "torch.utils.flop_counter.flop_registry": "FLOPs are counted by modes that are on already",
}
# Only in builds for CUDA.
ON_CUDA = frozenset(
    {
        "torch.cuda._sleep",
        "triton.runtime.driver.active.get_current_stream",
    }
)
