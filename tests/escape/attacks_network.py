"""Attacks on what else is on the host and beside the sandbox: networks, sockets, neighbours, secrets and
descriptors.
"""

from __future__ import annotations

import asyncio

from envd.client import ToolCall
from envd.operations.client import ManagedSandbox
from tests.escape.arena import Arena
from tests.escape.attack import KERNEL, NOWHERE, OWN_KERNEL, Attack

_FILE = "attack-beside.py"


async def _python(arena: Arena, code: str, sandbox: ManagedSandbox | None = None) -> str:
    sandbox = sandbox or await arena.sandbox()
    await sandbox.files.write(_FILE, f"from attempts import *\n{code}".encode())
    return (await sandbox.call(ToolCall("exec", {"command": f"python3 {_FILE}"}), timeout_s=arena.patience_s)).text


DIAL = """
def dial(host, port, kind=socket.SOCK_STREAM):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    s = socket.socket(family, kind)
    s.settimeout(2)
    s.connect((host, port))
    if kind == socket.SOCK_DGRAM:
        s.send(b"x")
    return s.getsockname()
"""
METADATA = (
    DIAL
    + """
for host in (
    "169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "169.254.170.2",
    "10.0.0.1", "192.168.0.1", "172.17.0.1", "1.1.1.1", "2606:4700:4700::1111", "255.255.255.255",
):
    attempt(host, dial, host, 80)
    attempt(host + " udp", dial, host, 53, socket.SOCK_DGRAM)
"""
)
NAMES = """
for name in ("metadata.google.internal", "example.com", "localhost.example.com", "kubernetes.default.svc"):
    attempt("resolve " + name, socket.getaddrinfo, name, 80)
"""
INTERFACES = """
try:
    names = [name for _, name in socket.if_nameindex()]
except OSError:
    names = ["lo"]
known = (
    "lo", "sit0", "tunl0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6gre0",
)
absent("interfaces beside the loopback", [name for name in names if name not in known])
import fcntl
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for what, number, data in (
    ("raise an interface", 0x8914, struct.pack("16sH14s", b"eth0", 1, b"")), ("add a route", 0x890B, bytes(120)),
    ("rename lo", 0x8923, struct.pack("16s16s", b"lo", b"x")), ("make a bridge", 0x89A0, b"br0".ljust(16, b"\\0")),
):
    attempt(what, fcntl.ioctl, s, number, data)
tun = struct.pack("16sH22s", b"tun0", 1, b"")
attempt("tun", lambda: fcntl.ioctl(os.open("/dev/net/tun", os.O_RDWR), 0x400454CA, tun))
"""


async def host_loopback(arena: Arena) -> str:
    ports = dict(arena.host.listeners)
    code = DIAL + "".join(f"attempt('{host}:{port}', dial, '{host}', {port})\n" for host, port in ports.items())
    code += (
        f"for port in range({min(ports.values())} - 20, {min(ports.values())} + 20):\n   "
        " attempt(f'127.0.0.1:{port}', dial, '127.0.0.1', port)\n"
    )
    return await _python(arena, code)


async def abstract_sockets(arena: Arena) -> str:
    names = [arena.host.abstract, arena.neighbour.abstract]
    code = (
        f"for name in {names!r}:\n    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):\n        attempt(name,"
        " lambda: socket.socket(socket.AF_UNIX, kind).connect(chr(0) + name))\n"
    )
    return await _python(arena, code)


async def server_socket(arena: Arena) -> str:
    path = arena.address.removeprefix("unix:")
    code = f"attempt('connect', lambda: socket.socket(socket.AF_UNIX).connect({path!r}))\n"
    code += (
        f"attempt('list', os.listdir, {path.rpartition('/')[0]!r})\nattempt('list /tmp of the host', os.listdir,"
        " '/proc/1/root/proc/1/root/tmp/envd')\n"
    )
    code += (
        "import glob\nabsent('sockets', [p for p in glob.glob('/tmp/**', recursive=True) + glob.glob('/run/**',"
        " recursive=True) if p.endswith('.sock')])\n"
    )
    return await _python(arena, code)


async def neighbour_service(arena: Arena) -> str:
    code = (
        DIAL + f"attempt('loopback', dial, '127.0.0.1', {arena.neighbour.port})\nattempt('host name', dial, 'sandbox',"
        f" {arena.neighbour.port})\n"
    )
    said = await _python(arena, code)
    visits = await arena.neighbour.visits()
    return f"{said}\n{'BREACH ' + visits if visits else 'nobody came'}"


async def neighbour_files(arena: Arena) -> str:
    secret = arena.neighbour.secret
    places = (
        "/etc /tmp /dev /run /var /workspace /.template /.scratch /proc/[0-9]*/cmdline /proc/[0-9]*/environ"
        " /proc/[0-9]*/root/workspace /proc/[0-9]*/cwd/ /proc/sysvipc"
    )
    command = (
        f"timeout 20 grep -rlsI -D skip {secret[:8]}'{secret[8:]}' {places} 2>/dev/null | head -3; ls"
        " /proc/[0-9]*/root/workspace/secret.txt 2>/dev/null; find /etc /tmp /run /var /dev /workspace /root -xdev"
        " -name secret.txt 2>/dev/null"
    )
    sandbox = await arena.sandbox()
    result = await sandbox.call(
        ToolCall("exec", {"command": f"({command}) | sed 's/^/BREACH /'; echo searched", "timeout_s": 60}), timeout_s=70
    )
    return result.text


async def neighbour_processes(arena: Arena) -> str:
    said = await _python(
        arena,
        "names = []\nfor pid in os.listdir('/proc'):\n    if pid.isdigit():\n        try:\n           "
        " names.append(open(f'/proc/{pid}/cmdline').read())\n        except OSError:\n            pass\nabsent('the"
        " neighbour', [n for n in names if 'heartbeat' in n])\nprint('kill -9 -1 next', flush=True)\nos.kill(-1, 9)\n",
    )
    return f"{said}\nthe neighbour beats: {await arena.neighbour.beats()}"


async def shared_ipc(arena: Arena) -> str:
    """System V keys and POSIX queues that the host and the neighbour hold."""
    code = f"""
for key in ({arena.host.shm_key}, {arena.neighbour.shm_key}):
    attempt(f"shmget {{key:x}}", call, "shmget", key, 16, 0)
for path in ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg"):
    try:
        absent(path, open(path).read().splitlines()[1:])
    except OSError as error:
        print("nothing of", path)
attempt("/dev/mqueue", os.listdir, "/dev/mqueue")
"""
    return await _python(arena, code)


async def token_of_a_neighbour(arena: Arena) -> str:
    """All that a sandbox can read must not hold a handle, an id, the host's secret or the server's environment."""
    sandbox = await arena.sandbox()
    words = [
        sandbox.id,
        sandbox.handle.token,
        arena.neighbour.sandbox.id,
        arena.neighbour.sandbox.handle.token,
        arena.host.secret,
    ]
    hashed = [word[::-1] for word in words]
    code = f"""
import stat
words = [word[::-1] for word in {hashed!r}]
def look(text, where):
    absent("secrets in " + where, [i for i, word in enumerate(words) if word in text])
look(repr(dict(os.environ)), "the environment")
for pid in [p for p in os.listdir("/proc") if p.isdigit()] + ["self"]:
    for name in ("environ", "cmdline", "mountinfo", "maps", "cgroup", "status"):
        try:
            text = open(f"/proc/{{pid}}/{{name}}", "rb").read().decode(errors="replace")
        except OSError:
            continue
        if pid != str(os.getpid()) or name != "maps":
            look(text, f"{{name}}")
for folder in ("/workspace", "/tmp", "/run", "/etc", "/.template", "/dev"):
    for top, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(top, name)
            if name != "{_FILE}" and not stat.S_ISFIFO(os.lstat(path).st_mode):  # a shell's pipe has no end
                try:
                    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    look(os.read(fd, 1 << 20).decode(errors="replace"), top)
                    os.close(fd)
                except OSError:
                    pass
print("searched to the end")
"""
    said = await _python(arena, code, sandbox)
    return "\n".join(sorted(set(said.splitlines())))


DESCRIPTORS = """
found, shells = [], set()
for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
    if pid == "1":
        continue
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        continue
    for name in names:
        try:
            kind = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if kind.startswith("socket:") and pid == str(os.getppid()):
            shells.add(kind)
        elif not kind.startswith(("pipe:", "/dev/null", "/tmp/.envd/", "/proc", "/workspace", "/.agent/")):
            found.append((pid, name, kind))
absent("descriptors of the server's", found)
absent("sockets of the shell beside the two that drive it", shells if len(shells) > 2 else ())
mine = []
for fd in range(3, 1024):
    try:
        os.fstat(fd)
        mine.append((fd, os.readlink(f"/proc/self/fd/{fd}")))
    except OSError:
        pass
absent("descriptors inherited", mine)
"""
PASSED_SOCKET = """
attempt("a stream as standard input", lambda: socket.socket(fileno=os.dup(0)).getpeername())
attempt("a stream as standard output", lambda: socket.socket(fileno=os.dup(1)).getpeername())
for fd in (200, 201):
    attempt(f"the shell's control descriptor {fd}", os.fstat, fd)
"""

ASK_PROXY = """
def ask(*pieces):
    s = socket.create_connection(("127.0.0.1", 3128), 10)
    s.settimeout(15)
    said = b""
    try:
        for piece in pieces:
            s.sendall(piece.encode())
            time.sleep(0.05)
        while data := s.recv(65536):
            said += data
    except OSError as error:
        print("cut off:", error, flush=True)
    return said.decode() or "HTTP/1.1 400 without a word"


def through(what, *pieces):
    said = ask(*pieces)
    answers = [line for line in said.split("\\r\\n") if line.startswith("HTTP/1.1 ")]
    refused = len(answers) == 1 and answers[0][9:11] in ("40", "50")
    print("refused" if refused else "BREACH", what, *answers, flush=True)
"""


async def egress_inwards(arena: Arena) -> str:
    """All of the internet is allowed; what is no part of it must not be reached by any spelling."""
    sandbox = await arena.sandbox(rules="network: {allow: [{host: 0.0.0.0/0}, {host: '::/0'}]}")
    listeners = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in arena.host.listeners]
    port = arena.host.listeners[0][1]
    spelled = [
        "127.1",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "0.0.0.0",
        "localhost",
        "LOCALHOST.",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "127.0.0.1.nip.io",
    ]
    metadata = [
        "169.254.169.254:80",
        "[fd00:ec2::254]:80",
        "[::ffff:169.254.169.254]:80",
        "100.100.100.200:80",
        "168.63.129.16:80",
        "metadata.google.internal:80",
        "10.0.0.1:80",
        "192.168.0.1:80",
        "172.17.0.1:2375",
        "2852039166:80",
    ]
    places = [*metadata, *listeners, *(f"{host}:{port}" for host in spelled)]
    code = f"""
for place in {places!r}:
    through(place + " tunnel", f"CONNECT {{place}} HTTP/1.1\\r\\nHost: {{place}}\\r\\n\\r\\n")
    through(place, f"GET http://{{place}}/latest HTTP/1.1\\r\\nHost: example.com\\r\\n\\r\\n")
"""
    return await _python(arena, ASK_PROXY + code, sandbox)


async def egress_smuggled(arena: Arena) -> str:
    """One destination is allowed; it must never hear a request that the proxy did not check."""
    heard = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            heard.extend(data)
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        there = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        inner = f"127.0.0.1:{arena.host.listeners[0][1]}"
        sandbox = await arena.sandbox(
            rules=f"network: {{allow: [{{host: 127.0.0.1, ports: [{there.rpartition(':')[2]}]}}]}}"
        )
        code = f"""
first = "POST http://{there}/first HTTP/1.1\\r\\nHost: {there}\\r\\n"
second = "GET http://{inner}/smuggled HTTP/1.1\\r\\nHost: {inner}\\r\\n\\r\\n"
for framing in (
    "Content-Length: 0", "Content-Length: 5\\r\\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\\r\\nContent-Length: 4", "Transfer-Encoding: xchunked",
    "Transfer-Encoding:\\x0bchunked", "Content-Length: 0\\r\\nContent-Length: 200",
    "Connection: Content-Length\\r\\nContent-Length: 5", "X: y\\nContent-Length: 5",
    "Transfer-Encoding: chunked\\r\\nTransfer-Encoding: cow", "Host: {inner}",
):
    through(repr(framing), first + framing + "\\r\\n\\r\\n0\\r\\n\\r\\n" + second)
    through(repr(framing) + " apart", first + framing + "\\r\\n\\r\\n", "0\\r\\n\\r\\n", second)
"""
        said = await _python(arena, ASK_PROXY + code, sandbox)
    return f"{said}\n{'BREACH smuggled' if b'smuggled' in heard else 'the destination heard the first ones alone'}"


_NONE = dict.fromkeys(("gvisor", "qemu"), "it gives no network: rules with destinations are denied")
_UNREACHABLE = r"refused 169\.254\.169\.254 (ENETUNREACH|EHOSTUNREACH|TimeoutError|EPERM|EACCES|ENETDOWN)"
ATTACKS = (
    Attack(
        "metadata-address",
        "network",
        "cloud metadata addresses, private networks and the internet, TCP and UDP",
        _UNREACHABLE,
        script=METADATA,
        unseen=KERNEL,
        timeout_s=60,
    ),
    Attack(
        "egress-inwards",
        "network",
        "the metadata address, private networks and the host's own services through the proxy of a sandbox that may"
        " reach all of the internet",
        r"refused 169\.254\.169\.254:80 tunnel HTTP/1\.1 403",
        act=egress_inwards,
        audit=("network.denied",),
        not_on=_NONE,
    ),
    Attack(
        "egress-smuggled",
        "network",
        "a second request smuggled past the proxy to a destination, by lengths that can be read in two ways",
        r"the destination heard the first ones alone",
        act=egress_smuggled,
        audit=("network.denied",),
        not_on=_NONE,
    ),
    Attack(
        "names-resolved",
        "network",
        "names resolved, as a way out by DNS",
        r"refused resolve example.com",
        script=NAMES,
        unseen=KERNEL,
        timeout_s=60,
    ),
    Attack(
        "interfaces",
        "network",
        "interfaces, routes, bridges and tunnels made or renamed",
        r"nothing of interfaces[\s\S]*refused tun",
        script=INTERFACES,
        unseen=KERNEL,
        harmless_on={"qemu": OWN_KERNEL},
    ),
    Attack(
        "host-loopback",
        "network",
        "services on the host's loopback and addresses",
        r"refused 127.0.0.1:\d+ ECONNREFUSED",
        act=host_loopback,
        unseen=NOWHERE,
        mark=_FILE,
        plain=True,
    ),
    Attack(
        "abstract-sockets",
        "network",
        "abstract Unix sockets of the host and of a neighbour",
        r"refused",
        act=abstract_sockets,
        unseen=NOWHERE,
        mark=_FILE,
        plain=True,
    ),
    Attack(
        "server-socket",
        "network",
        "the server's own socket and directory",
        r"refused connect ENOENT",
        act=server_socket,
        unseen=NOWHERE,
        mark=_FILE,
        plain=True,
    ),
    Attack(
        "neighbour-service",
        "neighbours",
        "a service on a neighbour's loopback",
        r"refused loopback ECONNREFUSED[\s\S]*nobody came",
        act=neighbour_service,
        unseen=NOWHERE,
        mark=_FILE,
        plain=True,
    ),
    Attack(
        "neighbour-files",
        "neighbours",
        "a neighbour's secret searched for in all that can be read",
        r"searched",
        act=neighbour_files,
        unseen=NOWHERE,
        mark="grep -rlsI",
        timeout_s=70,
    ),
    Attack(
        "neighbour-processes",
        "neighbours",
        "a neighbour's processes seen, and kill -9 -1",
        r"nothing of the neighbour[\s\S]*the neighbour beats: True",
        act=neighbour_processes,
        unseen=NOWHERE,
        mark=_FILE,
    ),
    Attack(
        "neighbour-ipc",
        "neighbours",
        "System V segments and message queues of the host and a neighbour, by their keys",
        r"refused shmget",
        act=shared_ipc,
        unseen=NOWHERE,
        mark=_FILE,
        plain=True,
    ),
    Attack(
        "secrets",
        "secrets",
        "ids, tokens and the server's environment searched for in every readable file of /proc and the disk",
        r"nothing of secrets in the environment[\s\S]*searched to the end",
        act=token_of_a_neighbour,
        unseen=NOWHERE,
        mark=_FILE,
    ),
    Attack(
        "leaked-descriptors",
        "secrets",
        "descriptors of the server, the spawner or a neighbour",
        r"nothing of descriptors inherited",
        script=DESCRIPTORS,
        unseen=NOWHERE,
    ),
    Attack(
        "control-descriptors",
        "secrets",
        "the shell's control descriptors and sockets inherited by commands",
        r"refused the shell's control descriptor 200 EBADF",
        script=PASSED_SOCKET,
        unseen=KERNEL,
    ),
)
