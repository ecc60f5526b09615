"""The engine: pipelines in fibers, their module calls fused. The only folder that imports torch."""

import logging

# diffusers imports torchao wherever it is installed; both warn in every process about torchao
# kernels that do not suit this machine
for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
    logging.getLogger(_name).setLevel(logging.ERROR)
