"""Common parts of modules with weights: parameters, the empty 8-bit state, tensor parallelism."""

import torch
import torch.nn.functional as functional


class TransformerEngineBaseModule(torch.nn.Module):
    """Module whose parameters are initialised as in Transformer Engine."""

    def __init__(self, name=None):
        super().__init__()
        self.name = name
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False, "recipe": None}
        self.tp_group, self.tp_size = None, 1

    def set_tensor_parallel_group(self, tp_group):
        """Set the group over which weights are sharded."""
        self.tp_group = tp_group

    def join(self, tp_group, tp_size):
        """Set the group and its size; without a group the size is ``tp_size``."""
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.set_tensor_parallel_group(tp_group)

    def add(self, name, shape, init, dtype, device, tracker=None):
        """Register a parameter and fill it with ``init``, under the generator of a given ``tracker``."""
        value = torch.empty(shape, dtype=dtype, device=device)
        if tracker is None:
            init(value)
        else:
            names = [self.rng_tracker_name] if getattr(self, "rng_tracker_name", None) else []
            with tracker().fork(*names):
                init(value)
        self.register_parameter(name, torch.nn.Parameter(value))

    def init_fp8_metadata(self, num_gemms=1):
        """Do nothing: there is no 8-bit format."""

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


def refuse(**settings):
    """Raise NotImplementedError if any setting requests a feature that the stand-in lacks."""
    asked = sorted(name for name, value in settings.items() if value)
    if asked:
        raise NotImplementedError(f"the stand-in of Transformer Engine has no {', '.join(asked)}")


def default_init(weight):
    """Fill a tensor with Transformer Engine's default initialisation."""
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


def constant(value):
    """Return a function that fills a tensor with ``value``."""
    return lambda tensor: tensor.detach().fill_(value)


def cut(parameter, dim):
    """Mark the dimension along which a parameter is sharded, as Megatron-Core's optimizer expects."""
    for name, value in (
        ("tensor_model_parallel", True),
        ("partition_dim", dim),
        ("partition_stride", 1),
    ):
        setattr(parameter, name, value)


def normalise(hidden, weight, bias, eps, kind, zero_centered):
    """Return the LayerNorm or RMSNorm of ``hidden``, computed in float32, in its dtype."""
    scale = weight.float() + 1.0 if zero_centered else weight.float()
    if kind == "RMSNorm":
        return functional.rms_norm(hidden.float(), scale.shape, scale, eps).to(hidden.dtype)
    return functional.layer_norm(hidden.float(), scale.shape, scale, bias.float(), eps).to(hidden.dtype)


class Norm(TransformerEngineBaseModule):
    """Common part of `LayerNorm` and `RMSNorm`, whose signatures are compared with the real ones by file."""

    def _prepare(
        self,
        normalized_shape,
        hidden_size,
        eps,
        sequence_parallel,
        params_dtype,
        zero_centered_gamma,
        more,
    ):
        assert (normalized_shape is None) != (hidden_size is None)
        size = hidden_size if normalized_shape is None else normalized_shape
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        dtype, device = (
            more.pop("dtype", params_dtype),
            more.pop("device", "cuda"),
        )
        if more:
            raise TypeError(f"unexpected arguments {sorted(more)}")
        self.add(
            "weight",
            (size,),
            constant(float(not zero_centered_gamma)),
            dtype,
            device,
        )
        if self.kind == "LayerNorm":
            self.add("bias", (size,), constant(0.0), dtype, device)
        else:
            self.bias = None
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
