"""What a loaded backend says of itself."""

import pytest

from dilabench.backends import math
from dilabench.contracts import LoadedBackend


def test_a_backend_gives_its_backward_pass_or_says_that_there_is_none() -> None:
    assert LoadedBackend("math", math.attend, math.attend_backward).require_backward() is math.attend_backward
    with pytest.raises(ValueError, match=r"backend one-way has no backward pass; use mode=forward or another backend"):
        LoadedBackend("one-way", math.attend).require_backward()
