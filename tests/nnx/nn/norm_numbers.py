"""What Flax 0.12.8 gives for the cases of ``norm_cases.py``.

A line with the name, the dtype of the output and the first entry of every leaf before the call,
and a line with the inner products after it; see ``norm_cases.figures``.
"""

_TABLE = """
BatchNorm random (float32): -2.44245577 0 1.00401425 1
    -1.782518 -3.277863 -0.01183159 1.985312 0.08926414
BatchNorm defaults (float32): 0 0 1 1
    -2.266325 0 -0.01183159 0.134163 0.08926414
BatchNorm epsilon (float32): -2.44245577 0 1.00401425 1
    -1.536312 -3.277863 -0.01183159 1.985312 0.08926414
BatchNorm dtype (bfloat16): -2.44245577 0 1.00401425 1
    -1.774638 -3.277863 -0.01179797 1.985312 0.08941088
BatchNorm param_dtype (float32): -0.271484375 0 1.15625 1
    -5.0658 -0.1473212 -0.01183159 -0.4373353 0.08926414
BatchNorm no scale (float32): 1.00401425 0 1
    -0.7670367 1.985312 -0.01183159 0.08926414
BatchNorm slow variance (float32): -2.44245577 0 1.00401425 1
    -1.782518 -3.277863 -0.01183159 1.985312 0.08926414
BatchNorm promote (float32): -2.44245577 0 1.00401425 1
    -2.899573 -3.277863 -0.01183159 1.985312 0.08926414
BatchNorm mask (float32): -2.44245577 0 1.00401425 1
    -3.306275 -3.277863 -0.01647345 1.985312 0.08166656
BatchNorm no bias (float32): 0 1.00401425 1
    -0.6654613 -0.01183159 1.985312 0.08926414
LayerNorm random (float32): -2.44245577 1.00401425
    -0.5679347 -3.277863 1.985312
LayerNorm defaults (float32): 0 1
    -3.179911 0 0.134163
LayerNorm epsilon (float32): -2.44245577 1.00401425
    -0.8410535 -3.277863 1.985312
LayerNorm dtype (bfloat16): -2.44245577 1.00401425
    -0.5740999 -3.277863 1.985312
LayerNorm param_dtype (float32): -0.271484375 1.15625
    -5.658903 -0.1473212 -0.4373353
LayerNorm no scale (float32): 1.00401425
    -1.680624 1.985312
LayerNorm slow variance (float32): -2.44245577 1.00401425
    -0.5679344 -3.277863 1.985312
LayerNorm promote (float32): -2.44245577 1.00401425
    -1.684991 -3.277863 1.985312
LayerNorm mask (float32): -2.44245577 1.00401425
    1.213688 -3.277863 1.985312
LayerNorm no bias (float32): 1.00401425
    0.5491215 1.985312
RMSNorm random (float32): 1.00401425
    1.093412 1.985312
RMSNorm defaults (float32): 1
    -2.347322 0.134163
RMSNorm epsilon (float32): 1.00401425
    1.008024 1.985312
RMSNorm dtype (bfloat16): 1.00401425
    1.088483 1.985312
RMSNorm param_dtype (float32): 1.15625
    -5.042604 -0.4373353
RMSNorm no scale (float32):
    -2.347322
RMSNorm slow variance (float32): 1.00401425
    1.093412 1.985312
RMSNorm promote (float32): 1.00401425
    2.186824 1.985312
RMSNorm mask (float32): 1.00401425
    1.258858 1.985312
GroupNorm random (float32): -2.44245577 1.00401425
    -0.8869626 -3.277863 1.985312
GroupNorm defaults (float32): 0 1
    -2.414317 0 0.134163
GroupNorm epsilon (float32): -2.44245577 1.00401425
    -0.8354448 -3.277863 1.985312
GroupNorm dtype (bfloat16): -2.44245577 1.00401425
    -0.8776253 -3.277863 1.985312
GroupNorm param_dtype (float32): -0.271484375 1.15625
    -4.908638 -0.1473212 -0.4373353
GroupNorm no scale (float32): 1.00401425
    -0.9150291 1.985312
GroupNorm slow variance (float32): -2.44245577 1.00401425
    -0.8869627 -3.277863 1.985312
GroupNorm promote (float32): -2.44245577 1.00401425
    -2.004018 -3.277863 1.985312
GroupNorm mask (float32): -2.44245577 1.00401425
    -1.112764 -3.277863 1.985312
GroupNorm no bias (float32): 1.00401425
    0.2300936 1.985312
InstanceNorm random (float32): -2.44245577 1.00401425
    -2.294649 -3.277863 1.985312
InstanceNorm defaults (float32): 0 1
    -4.21825 0 0.134163
InstanceNorm epsilon (float32): -2.44245577 1.00401425
    -1.611955 -3.277863 1.985312
InstanceNorm dtype (bfloat16): -2.44245577 1.00401425
    -2.319481 -3.277863 1.985312
InstanceNorm param_dtype (float32): -0.271484375 1.15625
    -7.037346 -0.1473212 -0.4373353
InstanceNorm no scale (float32): 1.00401425
    -2.718961 1.985312
InstanceNorm slow variance (float32): -2.44245577 1.00401425
    -2.294649 -3.277863 1.985312
InstanceNorm promote (float32): -2.44245577 1.00401425
    -3.411705 -3.277863 1.985312
InstanceNorm mask (float32): -2.44245577 1.00401425
    -7.48111 -3.277863 1.985312
InstanceNorm no bias (float32): 1.00401425
    -1.177593 1.985312
BatchNorm axis (float32): -2.44245577 0 1.00401425 1
    -8.321489 -3.627875 0.01607284 0.8256677 1.176616
BatchNorm momentum (float32): -2.44245577 0 1.00401425 1
    -1.782518 -3.277863 -0.5915797 1.985312 -2.110776
BatchNorm evaluates (float32): -2.44245577 0 1.00401425 1
    1.589659 -3.277863 0 1.985312 0.134163
BatchNorm evaluates in bfloat16 (bfloat16): -2.44245577 0 1.00401425 1
    1.556587 -3.277863 0 1.985312 0.134163
BatchNorm told to evaluate (float32): -2.44245577 0 1.00401425 1
    1.589659 -3.277863 0 1.985312 0.134163
BatchNorm told to train (float32): -2.44245577 0 1.00401425 1
    -1.782518 -3.277863 -0.01183159 1.985312 0.08926414
LayerNorm reduction axes (float32): -2.44245577 1.00401425
    -0.03043376 -3.277863 1.985312
LayerNorm feature axis (float32): -2.44245577 1.00401425
    -8.040721 -3.627875 0.8256677
LayerNorm feature axes (float32): -2.44245577 1.00401425
    -13.45243 -5.579444 5.207017
RMSNorm reduction axes (float32): 1.00401425
    1.19583 1.985312
RMSNorm feature axis (float32): 1.00401425
    0.2273879 0.8256677
RMSNorm feature axes (float32): 1.00401425
    0.755838 5.207017
GroupNorm group size (float32): -2.44245577 1.00401425
    -2.294649 -3.277863 1.985312
GroupNorm four groups (float32): -2.44245577 1.00401425
    -2.294649 -3.277863 1.985312
GroupNorm reduction axes (float32): -2.44245577 1.00401425
    -0.5679347 -3.277863 1.985312
InstanceNorm feature axis (float32): -2.44245577 1.00401425
    -8.040721 -3.627875 0.8256677
InstanceNorm feature axes (float32): -2.44245577 1.00401425
    -10.62715 -5.579444 5.207017
SpectralNorm defaults (float32): 1 0.0129563594 -2.44245577 0.535088897
    -4.240885 1.438491 1.187078 -3.627875 1.88006
SpectralNorm steps (float32): 1 0.0129563594 -2.44245577 0.535088897
    -4.221856 1.444866 1.197645 -3.627875 1.871765
SpectralNorm no steps (float32): -2.44245577 0.535088897
    -6.131978 -3.627875 2.704448
SpectralNorm epsilon (float32): 1 0.0129563594 -2.44245577 0.535088897
    -5.100897 1.199329 1.158084 -3.627875 2.254967
SpectralNorm dtype (float32): 1 0.0129563594 -2.44245577 0.535088897
    -4.229255 1.438491 1.187078 -3.627875 1.880421
SpectralNorm param_dtype (float32): 1 -0.00668334961 -2.44245577 0.535088897
    -4.285391 1.421875 -1.170979 -3.627875 1.899461
SpectralNorm half the bits (float32): 1 0.0129563594 0 0.61328125
    6.050963 1.158927 1.205689 0 0.4911732
SpectralNorm keeps (float32): 1 0.0129563594 -2.44245577 0.535088897
    -4.240885 1 0.02198207 -3.627875 1.88006
SpectralNorm told to keep (float32): 1 0.0129563594 -2.44245577 0.535088897
    -4.240885 1 0.02198207 -3.627875 1.88006
SpectralNorm told to update (float32): 1 0.0129563594 -2.44245577 0.535088897
    -4.240885 1.438491 1.187078 -3.627875 1.88006
SpectralNorm two layers (float32): 1 -0.0102088535 1 0.00637377147 0 0.608026624 0 0.535088897
    -12.66387 0.8717659 0.8250169 1.119112 -1.061233 0 1.98921 0 2.233437
SpectralNorm tensor (float32): 1 -0.0244245566 1.00401425
    -0.0335144 3.426702 -1.207129 1.085999
WeightNorm defaults (float32): -2.44245577 0.535088897 1
    -5.16599 -3.627875 2.141783 1.124155
WeightNorm epsilon (float32): -2.44245577 0.535088897 1
    -4.406524 -3.627875 1.865673 1.124155
WeightNorm no scale (float32): -2.44245577 0.535088897
    -5.16599 -3.627875 2.141783
WeightNorm scale_init (float32): -2.44245577 0.535088897 2
    -10.40383 -3.627875 4.283565 2.248311
WeightNorm dtype (float32): -2.44245577 0.535088897 1
    -5.159804 -3.627875 2.140884 1.124155
WeightNorm param_dtype (float32): -2.44245577 0.535088897 1
    -5.16599 -3.627875 2.141783 1.124155
WeightNorm half the bits (float32): 0 0.61328125 1
    6.446961 0 0.1905896 1.124155
WeightNorm feature axis (float32): -2.44245577 0.535088897 1
    -6.841965 -3.627875 2.815331 0.134163
WeightNorm feature axes (float32): 1.00401425 1
    -8.319983 1.492945 -0.413022
WeightNorm one length (float32): -2.44245577 0.535088897 1
    -3.078882 -3.627875 1.373505 1
WeightNorm filter (float32): -2.44245577 0.535088897 1 1
    -5.544313 -1.956449 2.141783 1.124155 1.124155
WeightNorm two layers (float32): 0 0.608026624 0 0.535088897 1 1
    -10.96332 0 1.595018 0 1.89052 1.124155 -0.5194806
Dropout defaults (float32):
    -10.66375
Dropout rate (float32):
    -3.569029
Dropout rows (float32):
    -13.07624
Dropout columns (float32):
    -6.682332
Dropout none (float32):
    -5.698917
Dropout all (float32):
    0
Dropout deterministic (float32):
    -5.698917
Dropout bfloat16 (bfloat16):
    -7.231489
Dropout stream (float32):
    -9.263252
Dropout collection (float32):
    -9.263252
Dropout key at call (float32):
    -11.81639
Dropout rngs at call (float32):
    -2.551322
Dropout stream at call (float32):
    -2.551322
Dropout told to let through (float32):
    -5.698917
Dropout told to drop (float32):
    -7.227126
LoRA zero (float32): 0.838494956 0
    0 2.246327 0
LoRA random (float32): 0.838494956 -2.44245577
    25.20181 2.246327 -3.114114
LoRA initializers (float32): 1.00401425 1
    -12.72137 2.643714 -0.2358185
LoRA dtype (bfloat16): 0.838494956 -2.44245577
    25.32531 2.246327 -3.114114
LoRA param_dtype (float32): 0.921875 -0.271484375
    -7.220145 -0.06407345 1.635944
LoRA promote (float32): 0.838494956 -2.44245577
    50.40362 2.246327 -3.114114
LoRA base (float32): 0 0.287338287 0.838494956 -2.44245577
    20.70275 0 1.022745 2.246327 -3.114114
LoRA function (float32): 0.838494956 -2.44245577
    24.3916 2.246327 -3.114114
LoRALinear zero (float32): 0 0.535088897 0.985795915 0
    -6.203824 0 2.704448 2.144119 0
LoRALinear random (float32): -2.44245577 0.535088897 0.985795915 -0.621943593
    6.696658 -3.627875 2.704448 2.144119 1.616384
LoRALinear initializers (float32): 0.535088897 -2.44245577 1.29563594
    3.136363 2.704448 -3.992567 2.718726
LoRALinear lora_dtype (float32): 0 0.535088897 0.985795915 -0.621943593
    6.603083 0 2.704448 2.144119 1.616384
LoRALinear lora_param_dtype (float32): 0 0.535088897 -0.61328125 -0.212890625
    -1.642299 0 2.704448 -2.585133 0.9773004
LoRALinear lora_promote (float32): 0 0.535088897 0.985795915 -0.621943593
    19.45345 0 2.704448 2.144119 1.616384
LoRALinear linear options (float32): 0 0.61328125 0.985795915 -0.621943593
    19.85407 0 0.5727976 2.144119 1.616384
"""


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split()]


def _read() -> dict[str, tuple[str, list[float], list[float]]]:
    lines = _TABLE.strip().splitlines()
    table = {}
    for head, after in zip(lines[::2], lines[1::2], strict=True):
        name, _, rest = head.partition(" (")
        dtype, _, before = rest.partition("):")
        table[name] = (dtype, _numbers(before), _numbers(after))
    return table


NUMBERS = _read()
