"""Async tests of the router run in an event loop of their own."""

import pytest
from doubles.router.whole_router import run_async_test

pytest_pyfunc_call = pytest.hookimpl(tryfirst=True)(run_async_test)
