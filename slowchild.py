import os, time, threading
def pytest_runtest_teardown(item): pass
