"""Application of a function to lists of tensors."""


class MultiTensorApply:
    """Callable that passes its chunk size to a function, and leaves out tensors without elements."""

    def __init__(self, chunk_size):
        self.chunk_size = chunk_size

    def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
        if any(len(tensors) != len(tensor_lists[0]) for tensors in tensor_lists):
            raise RuntimeError("Expected aligned multi-tensor lists.")
        kept = [tensor.numel() > 0 for tensor in tensor_lists[0]]
        lists = [[one for one, keep in zip(row, kept, strict=True) if keep] for row in tensor_lists]
        return op(self.chunk_size, noop_flag_buffer, lists, *args) if lists[0] else None


multi_tensor_applier = MultiTensorApply(2048 * 32)
