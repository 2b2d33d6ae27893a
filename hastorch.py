import sys, time
def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"): print("TORCH in controller:", "torch" in sys.modules, time.process_time())
