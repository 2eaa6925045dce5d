"""``Variable`` under the path that older programs import it from."""

from linnet.core.scope import Variable as Variable
