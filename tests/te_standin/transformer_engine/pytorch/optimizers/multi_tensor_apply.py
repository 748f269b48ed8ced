"""Application of a function to lists of tensors."""


class MultiTensorApply:
    """Callable that applies a function to lists of tensors, without the empty tensors."""

    def __init__(self, chunk_size):
        self.chunk_size = chunk_size

    def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
        """Call ``op`` on the lists without empty tensors; return None if no tensor remains."""
        num_tensors = len(tensor_lists[0])
        if any(len(tensors) != num_tensors for tensors in tensor_lists):
            raise RuntimeError("Expected aligned multi-tensor lists.")

        # The first list decides, since tensors at one index have one size.
        indices = [index for index in range(num_tensors) if tensor_lists[0][index].numel() > 0]
        if not indices:
            return None

        nonempty_lists = [[tensors[index] for index in indices] for tensors in tensor_lists]
        return op(self.chunk_size, noop_flag_buffer, nonempty_lists, *args)


# Number of elements per block of a CUDA kernel in the real package; without effect here.
multi_tensor_applier = MultiTensorApply(2048 * 32)
