"""Common code of modules with weights: parameters, the empty 8-bit state, tensor parallelism."""

import torch
import torch.nn.functional as functional


class TransformerEngineBaseModule(torch.nn.Module):
    """Module whose parameters are initialised as in Transformer Engine."""

    def __init__(self, name=None):
        super().__init__()
        self.name = name

        # Megatron-Core reads these attributes; 8-bit formats are always disabled here.
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False, "recipe": None}
        self.tp_group = None
        self.tp_size = 1

    def set_tensor_parallel_group(self, tp_group):
        """Set the group over which weights are sharded."""
        self.tp_group = tp_group

    def set_parallelism(self, tp_group, tp_size):
        """Set the tensor-parallel group and its size; ``tp_size`` counts only without a group."""
        if tp_group is not None:
            tp_size = tp_group.size()
        self.tp_size = tp_size
        self.set_tensor_parallel_group(tp_group)

    def add_parameter(self, name, shape, init, dtype, device, get_rng_tracker=None):
        """Register a parameter and fill it with ``init``, in the random state of ``get_rng_tracker()``."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        # Biases and norms start with constants, so they need no tracker.
        if get_rng_tracker is None:
            init(tensor)
        else:
            # Shards of a weight differ between ranks, so each rank draws from a state of its own.
            state_names = []
            if getattr(self, "rng_tracker_name", None):
                state_names.append(self.rng_tracker_name)
            with get_rng_tracker().fork(*state_names):
                init(tensor)

        self.register_parameter(name, torch.nn.Parameter(tensor))

    def init_fp8_metadata(self, num_gemms=1):
        """Do nothing: there is no 8-bit format."""

    # Checkpoints of Megatron-Core contain the extra state of every module.
    def get_extra_state(self):
        """Return the state of 8-bit scaling, which is empty."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        """Accept the state of 8-bit scaling, which must be empty."""
        if state is not None and state.numel():
            raise NotImplementedError("the stand-in of Transformer Engine takes no 8-bit state")

    def backward_dw(self):
        """Raise NotImplementedError: weight gradients are not delayed."""
        raise NotImplementedError("the stand-in of Transformer Engine delays no weight gradients")


def refuse(**is_requested):
    """Raise NotImplementedError if any feature is requested that the stand-in lacks."""
    features = sorted(name for name, value in is_requested.items() if value)
    if features:
        raise NotImplementedError(f"the stand-in of Transformer Engine has no {', '.join(features)}")


def default_init(weight):
    """Fill a tensor with Transformer Engine's default initialisation."""
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


def constant(value):
    """Return a function that fills a tensor with ``value``."""
    # Detached, since a leaf that requires a gradient cannot be changed in place.
    return lambda tensor: tensor.detach().fill_(value)


def mark_sharded(parameter, dim):
    """Mark the dimension along which a parameter is sharded, as Megatron-Core's optimizer expects."""
    # setattr, because torch.Tensor does not declare these attributes.
    setattr(parameter, "tensor_model_parallel", True)
    setattr(parameter, "partition_dim", dim)
    setattr(parameter, "partition_stride", 1)


def normalise(hidden, weight, bias, eps, normalization, zero_centered_gamma):
    """Return the LayerNorm or RMSNorm of ``hidden``, computed in float32, in its dtype."""
    scale = weight.float()
    # A zero-centered weight is stored as its difference from one.
    if zero_centered_gamma:
        scale = scale + 1.0

    if normalization == "RMSNorm":
        normalised = functional.rms_norm(hidden.float(), scale.shape, scale, eps)
    else:
        normalised = functional.layer_norm(hidden.float(), scale.shape, scale, bias.float(), eps)
    return normalised.to(hidden.dtype)


class Norm(TransformerEngineBaseModule):
    """Common code of `LayerNorm` and `RMSNorm`, which have a file each as in the real package."""

    def _add_parameters(
        self,
        normalized_shape,
        hidden_size,
        eps,
        sequence_parallel,
        params_dtype,
        zero_centered_gamma,
        keyword_arguments,
    ):
        """Create weight and bias from the arguments of the constructor."""
        # The size has two names, a current one and the one of old versions.
        assert (normalized_shape is None) != (hidden_size is None)
        if normalized_shape is None:
            normalized_shape = hidden_size

        dtype = keyword_arguments.pop("dtype", params_dtype)
        device = keyword_arguments.pop("device", "cuda")
        if keyword_arguments:
            raise TypeError(f"unexpected arguments {sorted(keyword_arguments)}")

        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        init = constant(float(not zero_centered_gamma))
        self.add_parameter("weight", (normalized_shape,), init, dtype, device)
        if self.kind == "LayerNorm":
            self.add_parameter("bias", (normalized_shape,), constant(0.0), dtype, device)
        else:
            self.bias = None

        # Megatron-Core sums the gradients of marked parameters over the tensor-parallel group.
        if sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel

    def forward(self, hidden):
        """Return the normalised ``hidden``, in its dtype."""
        return normalise(
            hidden,
            self.weight,
            self.bias,
            self.eps,
            self.kind,
            self.zero_centered_gamma,
        )
