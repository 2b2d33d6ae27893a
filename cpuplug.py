import os, pytest, json
ROOT = int(os.environ["CPUWRAP"]); T = os.sysconf("SC_CLK_TCK")
def tree():
    kids, cpu = {}, {}
    for d in os.listdir("/proc"):
        if d.isdigit():
            try:
                with open(f"/proc/{d}/stat") as file: f = file.read().rpartition(")")[2].split()
            except OSError: continue
            kids.setdefault(int(f[1]), []).append(int(d)); cpu[int(d)] = sum(map(int, f[11:15]))
    tot, todo = 0, [ROOT]
    while todo:
        x = todo.pop(); tot += cpu.get(x, 0); todo += kids.get(x, [])
    return tot / T
found = {}
start = tree()
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    a = tree()
    try: return (yield)
    finally: found[item.nodeid] = tree() - a
def pytest_collection_finish(session): print("collected at CPU", tree())
def pytest_terminal_summary(terminalreporter):
    n = int(os.environ.get("TOP", "15"))
    t = sum(found.values())
    terminalreporter.write_line(f"cpu: tests {t:.2f} in {len(found)}")
    for k, v in sorted(found.items(), key=lambda x: -x[1])[:n]:
        if v >= .2: terminalreporter.write_line(f"{v:7.2f} {k[:140]}")

