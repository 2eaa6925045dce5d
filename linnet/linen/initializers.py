"""Initializers, as ``linen`` offers them."""

from linnet.functional.initializers import Initializer as Initializer
from linnet.functional.initializers import constant as constant
from linnet.functional.initializers import delta_orthogonal as delta_orthogonal
from linnet.functional.initializers import glorot_normal as glorot_normal
from linnet.functional.initializers import glorot_uniform as glorot_uniform
from linnet.functional.initializers import he_normal as he_normal
from linnet.functional.initializers import he_uniform as he_uniform
from linnet.functional.initializers import kaiming_normal as kaiming_normal
from linnet.functional.initializers import kaiming_uniform as kaiming_uniform
from linnet.functional.initializers import lecun_normal as lecun_normal
from linnet.functional.initializers import lecun_uniform as lecun_uniform
from linnet.functional.initializers import normal as normal
from linnet.functional.initializers import ones as ones
from linnet.functional.initializers import ones_init as ones_init
from linnet.functional.initializers import orthogonal as orthogonal
from linnet.functional.initializers import truncated_normal as truncated_normal
from linnet.functional.initializers import uniform as uniform
from linnet.functional.initializers import variance_scaling as variance_scaling
from linnet.functional.initializers import xavier_normal as xavier_normal
from linnet.functional.initializers import xavier_uniform as xavier_uniform
from linnet.functional.initializers import zeros as zeros
from linnet.functional.initializers import zeros_init as zeros_init
