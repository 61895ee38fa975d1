//! Sandboxes on the real kernel: what a program in one sees, and what a hostile one cannot reach.
//!
//! Programs are Python's, because it can make any system call. Not here: images (`image`), cells (`cells`).

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Instant;

use nagaya_keeper::sandbox::{
    ChildStep, ROOT_PID, SandboxAddress, SandboxBind, SandboxError, SandboxProgram,
};
use rustix::process::Signal;

use crate::Fact;
use crate::scene::{self, Scene, TIMEOUT, launcher, program, python, read_all, run, shell};
use crate::world::{ALICE, BOB, set_mode};

pub const ROOT: &[Fact] = &[
    ("a program in a sandbox has its tenant's uid, no rights and a number of its own", has_own_ids),
    ("a program in a sandbox sees its own files and a read-only base", its_files),
    ("a sandbox has nothing of other tenants and of the keeper in sight", others_files),
    ("a sandbox shows of the node what programs run on, and no other directory", its_top_level),
    ("a sandbox has loopback and no other network", its_network),
    ("a program that does not start in a sandbox says why", not_started),
    ("a program in a sandbox listens where it is told and is connected to", listens),
    ("a program in a sandbox cannot mount, trace, or make namespaces", no_calls),
    ("a program in a sandbox cannot leave it by a path", no_escape),
    ("a program in a sandbox changes nothing of the kernel's", no_kernel),
    ("a program in a sandbox cannot signal or see anything outside", no_signals),
    ("a program in a sandbox cannot connect to the keeper or any other service", no_services),
    ("a sandbox' first process cannot be touched from inside", no_init),
    ("a program in a sandbox has a limit of descriptors that it cannot raise", descriptors),
    ("what is bound is looked up with the tenant's rights", binds_of_tenant),
    ("a fork bomb stays within the cell a sandbox is born in on cgroup v1", bomb_v1),
    ("a fork bomb ends with its sandbox on cgroup v2", bomb_v2),
    ("a daemon that has left everything ends with its sandbox", daemon),
    ("a sandbox ends with what holds it, and its program's end is told", ends),
    ("the keeper lets go of a sandbox' mount namespace last", taken_apart_by_keeper),
    ("many sandboxes are made at once", many),
    ("a sandbox that is tried is made, and a program runs in it", tried),
];

fn tried() {
    nagaya_keeper::sandbox::try_sandbox(launcher()).unwrap();
}

fn has_own_ids() {
    let scene = Scene::new();
    let sandbox = scene.create();
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let code = "import os\n\
        print(os.getpid(), os.getppid(), os.getresuid(), os.getresgid(), os.getgroups(), os.uname()[1])\n\
        print(open('/proc/self/status').read())";
    let task = sandbox
        .run(&SandboxProgram {
            pid: Some(ROOT_PID),
            stdout: Some(write.as_fd()),
            ..program(&["python3", "-c", code])
        })
        .unwrap();
    drop(write);
    let said = read_all(read);
    assert_eq!(task.pid, ROOT_PID);
    assert_eq!(task.wait(TIMEOUT).unwrap().status, Some(0), "{said}");
    let ids = format!("10 1 ({ALICE}, {ALICE}, {ALICE}) ({ALICE}, {ALICE}, {ALICE}) [] alices");
    assert_eq!(said.lines().next(), Some(ids.as_str()));
    for line in ["CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000"] {
        assert!(said.contains(line), "{said}");
    }
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2", "Seccomp_filters:\t1"] {
        assert!(said.contains(line), "{said}");
    }
}

fn its_files() {
    let scene = Scene::new().with_file("mine", "alice's");
    let sandbox = scene.create();
    assert_eq!(shell(&sandbox, "cat mine; echo more > made; echo t > /tmp/t; echo r > /run/r"), "alice's");
    assert_eq!(fs::read_to_string(scene.app("made")).unwrap(), "more\n");
    assert_eq!(fs::read_to_string(scene.dir.path().join("run/r")).unwrap(), "r\n");
    assert_eq!(shell(&sandbox, "cat /var/tmp/t"), "t", "/var/tmp is /tmp");
    let refused = python(
        &sandbox,
        "import errno\n\
         for path in ['/x', '/usr/x', '/etc/x', '/var/x', '/dev/x', '/home/x', '/srv/x', '/sys/x']:\n\
         \x20   try: open(path, 'w'); print(path, 'was written')\n\
         \x20   except OSError as error: print(path, errno.errorcode[error.errno])",
    );
    for line in refused.lines() {
        let (_, why) = line.split_once(' ').unwrap();
        assert!(["EROFS", "EACCES", "ENOENT"].contains(&why), "{line}");
    }
    let device = "test \"$(head -c 2 /dev/zero | tr '\\0' 0)\" = 00 && head -c 4 /dev/urandom | wc -c && echo > /dev/null";
    assert_eq!(shell(&sandbox, device), "4");
    assert_eq!(shell(&sandbox, "echo shared > /dev/shm/x && cat /dev/shm/x"), "shared");
}

fn others_files() {
    let mut scene = Scene::new();
    let hidden = tempfile::tempdir_in("/var").unwrap();
    set_mode(hidden.path(), 0o755);
    fs::write(hidden.path().join("bobs"), "open to all").unwrap();
    let open = scene.create();
    let path = hidden.path().join("bobs");
    assert_eq!(shell(&open, &format!("cat {}", path.display())), "open to all");
    scene.spec.hide.push(hidden.path().into());
    let sandbox = scene.create();
    assert_eq!(shell(&sandbox, &format!("ls -A {}", hidden.path().display())), "");
    for path in ["/home", "/root", "/mnt", "/var/log", "/var/spool"] {
        assert_eq!(shell(&sandbox, &format!("! test -e {path} || ls -A {path}")), "", "{path}");
    }
    assert_eq!(shell(&sandbox, "ls /srv"), "app");
    // The directory of this test, in which the keeper would be.
    assert_eq!(shell(&sandbox, &format!("ls -d {} 2>/dev/null; true", scene.dir.path().display())), "");
    let pids =
        python(&sandbox, "import os; print(*[name for name in os.listdir('/proc') if name.isdigit()])");
    assert_eq!(pids.split(' ').count(), 1, "it sees itself alone: {pids}");
    let mounts = shell(&sandbox, "cat /proc/self/mountinfo");
    assert!(!mounts.contains("cgroup"), "{mounts}");
    let procs =
        mounts.lines().filter(|line| line.split(' ').nth(3) == Some("/") && line.contains(" - proc "));
    assert_eq!(procs.count(), 1, "the node's /proc is gone, and its own is there: {mounts}");
    assert!(!mounts.contains("tmpfs rw,size=16777216k"), "{mounts}");
}

fn its_top_level() {
    // As a host may have for its customers, open to all.
    let customers = tempfile::Builder::new().prefix("customers-").tempdir_in("/").unwrap();
    set_mode(customers.path(), 0o755);
    fs::write(customers.path().join("file"), "open to all").unwrap();
    let link = customers.path().with_extension("link");
    std::os::unix::fs::symlink(customers.path(), &link).unwrap();
    let homes = tempfile::Builder::new().prefix("homes-").tempdir_in("/var").unwrap();
    set_mode(homes.path(), 0o755);
    fs::write(homes.path().join("file"), "open to all").unwrap();
    let mut scene = Scene::new();
    scene.spec.hide.push(homes.path().into());
    let seen = |scene: &Scene| shell(&scene.create(), "ls -A /");
    let check = |seen: &str| {
        let is_expected = |name: &str| {
            let own = ["proc", "sys", "dev", "run", "tmp", "srv", ".hidden", ".nothing"];
            let programs = ["bin", "sbin", "etc", "usr", "var", "opt", "nix", "gnu"];
            own.contains(&name) || programs.contains(&name) || name.starts_with("lib")
        };
        let others: Vec<&str> = seen.lines().filter(|name| !is_expected(name)).collect();
        assert_eq!(others, [""; 0], "{seen}");
        for name in ["etc", "usr", "var", "bin"] {
            assert!(seen.lines().any(|line| line == name), "{name} is not there: {seen}");
        }
    };
    check(&seen(&scene));
    let sandbox = scene.create();
    for path in [customers.path(), &link, homes.path()] {
        let file = path.join("file");
        assert_eq!(shell(&sandbox, &format!("test -e {} || echo hidden", file.display())), "hidden");
    }
    // The same by another name.
    scene.spec.base = "/usr/..".into();
    check(&seen(&scene));
    fs::remove_file(link).unwrap();
}

fn its_network() {
    let scene = Scene::new();
    let sandbox = scene.create();
    let said = python(
        &sandbox,
        "import socket, errno\n\
         print(*[name for _, name in socket.if_nameindex() if name == 'lo' or open('/proc/net/dev') is None])\n\
         for address in ['192.0.2.1', '127.0.0.1']:\n\
         \x20   try: socket.create_connection((address, 9), 5)\n\
         \x20   except OSError as error: print(errno.errorcode[error.errno])\n\
         server = socket.create_server(('127.0.0.1', 0))\n\
         client = socket.create_connection(server.getsockname())\n\
         print('loopback works')",
    );
    assert_eq!(said, "lo\nENETUNREACH\nECONNREFUSED\nloopback works");
}

fn not_started() {
    let scene = Scene::new().with_file("script", "no program").with_file("no-interpreter", "#!/no/such\n");
    let sandbox = scene.create();
    let refused = |command: &[&str]| match sandbox.run(&program(command)) {
        Err(SandboxError::Run { step: ChildStep::Program, error }) => error.raw_os_error().unwrap(),
        other => panic!("{command:?}: {other:?}"),
    };
    assert_eq!(refused(&["no-such-program"]), rustix::io::Errno::NOENT.raw_os_error());
    assert_eq!(refused(&["./script"]), rustix::io::Errno::NOEXEC.raw_os_error());
    assert_eq!(refused(&["./no-interpreter"]), rustix::io::Errno::NOENT.raw_os_error());
    assert_eq!(refused(&["/etc/passwd"]), rustix::io::Errno::ACCESS.raw_os_error());
    let elsewhere = SandboxProgram { directory: "/no/such".into(), ..program(&["true"]) };
    assert!(matches!(sandbox.run(&elsewhere), Err(SandboxError::Run { step: ChildStep::Directory, .. })));
    assert_eq!(shell(&sandbox, "echo it goes on"), "it goes on");
    let mut spec = scene.spec.clone();
    spec.binds[0].source = "/no/such".into();
    let refused = launcher().create(&spec).unwrap_err().to_string();
    assert!(refused.contains("/no/such") && refused.contains("No such file"), "{refused}");
    spec.identity.uid = 0;
    assert!(matches!(launcher().create(&spec), Err(SandboxError::Spec(_))));
    spec.identity.uid = ALICE;
    spec.binds[0] = SandboxBind { target: "/usr/no/such".into(), ..scene.spec.binds[0].clone() };
    let refused = launcher().create(&spec).unwrap_err().to_string();
    assert!(refused.contains("/usr/no is missing in the base"), "{refused}");
}

const HANDED_SERVER: &str = "import os, socket\n\
    assert os.environ['LISTEN_FDS'] == '1' and os.environ['LISTEN_PID'] == str(os.getpid())\n\
    server = socket.socket(fileno=3)\n\
    while True:\n\
    \x20   client, _ = server.accept()\n\
    \x20   client.sendall(b'handed ' + client.recv(100))\n\
    \x20   client.close()\n";

const OWN_SERVER: &str = "import os, socket, sys\n\
    if sys.argv[1].startswith('/'):\n\
    \x20   server = socket.socket(socket.AF_UNIX); server.bind(sys.argv[1]); server.listen()\n\
    else:\n\
    \x20   server = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n\
    print('ready', flush=True)\n\
    while True:\n\
    \x20   client, _ = server.accept()\n\
    \x20   client.sendall(b'own ' + client.recv(100))\n\
    \x20   client.close()\n";

fn talk(socket: OwnedFd) -> String {
    rustix::io::ioctl_fionbio(&socket, false).unwrap();
    let mut stream = UnixStream::from(socket);
    stream.write_all(b"hello").unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    said
}

fn listens() {
    let scene = Scene::new();
    let sandbox = scene.create();
    let path = scene.dir.path().join("listener.sock");
    let listener = sandbox.listener(&path).unwrap();
    // Queued before anybody is there to accept.
    let early = sandbox.connect(&SandboxAddress::Listener(path.clone())).unwrap();
    let server = ["python3", "-c", HANDED_SERVER];
    let _handed =
        sandbox.run(&SandboxProgram { listener: Some(listener.as_fd()), ..program(&server) }).unwrap();
    assert_eq!(talk(early), "handed hello");
    assert_eq!(talk(sandbox.connect(&SandboxAddress::Listener(path)).unwrap()), "handed hello");
    for (argument, address) in [
        ("/run/app.sock", SandboxAddress::Socket("/run/app.sock".into())),
        ("8123", SandboxAddress::Port(8123)),
    ] {
        let refused = sandbox.connect(&address).unwrap_err();
        let expected = [std::io::ErrorKind::NotFound, std::io::ErrorKind::ConnectionRefused];
        assert!(expected.contains(&refused.kind()), "{refused}");
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let command = ["python3", "-c", OWN_SERVER, argument];
        let _own = sandbox.run(&SandboxProgram { stdout: Some(write.as_fd()), ..program(&command) }).unwrap();
        scene::wait_readable(&read);
        assert_eq!(talk(sandbox.connect(&address).unwrap()), "own hello");
    }
    // A link of the tenant's to another's socket is not followed.
    shell(&sandbox, "ln -s /run/app.sock /run/link.sock");
    assert!(sandbox.connect(&SandboxAddress::Socket("/run/link.sock".into())).is_err());
}

/// Makes system calls by their numbers on this architecture, and prints how each ended.
const CALLS: &str = "import ctypes, errno, os, sys\n\
    libc = ctypes.CDLL(None, use_errno=True)\n\
    def call(name, *args):\n\
    \x20   result = libc[name](*args)\n\
    \x20   print(name, 'worked' if result >= 0 else errno.errorcode[ctypes.get_errno()])\n\
    def number(name, which, *args):\n\
    \x20   result = libc.syscall(which, *args)\n\
    \x20   print(name, 'worked' if result >= 0 else errno.errorcode[ctypes.get_errno()])\n";

#[track_caller]
fn refused(said: &str, expected: &[&str]) {
    for line in said.lines() {
        let (call, how) = line.rsplit_once(' ').unwrap();
        assert!(expected.contains(&how), "{call}: {how}");
    }
    assert!(!said.is_empty());
}

fn no_calls() {
    let scene = Scene::new();
    let sandbox = scene.create();
    let calls = "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)\n\
        call('umount2', b'/usr', 2)\n\
        call('unshare', 0x10000000)\n\
        call('unshare', 0x20000)\n\
        call('setns', 0, 0)\n\
        call('ptrace', 16, os.getppid(), 0, 0)\n\
        call('chroot', b'/tmp')\n\
        call('pivot_root', b'/tmp', b'/tmp')\n\
        call('sethostname', b'x', 1)\n\
        call('swapon', b'/tmp/x', 0)\n\
        call('reboot', 0x1234567)\n\
        call('clone', 0, 0, 0x10000000 | 17, 0)\n\
        call('init_module', 0, 0, b'')\n\
        call('setuid', 0)\n\
        number('bpf', 321 if os.uname().machine == 'x86_64' else 280, 0, 0, 0)\n\
        number('keyctl', 250 if os.uname().machine == 'x86_64' else 219, 0, 0)\n\
        number('fsopen', 430, b'tmpfs', 0)\n\
        number('open_tree', 428, -100, b'/', 1)\n\
        number('io_uring_setup', 425, 4, ctypes.create_string_buffer(256))\n\
        number('io_setup', 206 if os.uname().machine == 'x86_64' else 0, 4, ctypes.byref(ctypes.c_long()))\n\
        number('userfaultfd', 323 if os.uname().machine == 'x86_64' else 282, 0)\n\
        call('socket', 2, 1, 262)\n\
        call('socket', 10, 1 | 0x80000, 262)\n";
    let said = python(&sandbox, &format!("{CALLS}{calls}"));
    refused(&said, &["EPERM", "EINVAL", "ENOSYS", "EPROTONOSUPPORT"]);
    assert_eq!(said.lines().count(), 23);
    // Programs that prefer MPTCP, like those in Go, listen by TCP then.
    assert_eq!(said.matches("socket EPROTONOSUPPORT").count(), 2, "{said}");
    for line in ["mount EPERM", "ptrace EPERM", "unshare EPERM", "io_uring_setup ENOSYS", "io_setup ENOSYS"] {
        assert!(said.contains(line), "{said}");
    }
    assert_eq!(shell(&sandbox, "for i in 1 2 3; do (true); done; echo forks"), "forks");
    assert_eq!(
        python(
            &sandbox,
            "import threading as t; x = t.Thread(target=print, args=('threads',)); x.start(); x.join()"
        ),
        "threads"
    );
}

fn no_escape() {
    let scene = Scene::new();
    let secret = scene.dir.path().join("secret");
    fs::write(&secret, "secret").unwrap();
    set_mode(&secret, 0o644);
    let sandbox = scene.create();
    let secret = secret.display();
    let code = format!(
        "import errno, os\n\
         up = '../' * 40\n\
         for path in ['/proc/1/root{secret}', '/proc/1/cwd{secret}', '/proc/self/root{secret}', '{secret}', up + '{secret}',\n\
         \x20            '/proc/1/fd/0', '/proc/1/environ', '/proc/1/mem', '/proc/1/maps', '/proc/kcore', '/dev/mem', '/dev/sda',\n\
         \x20            '/dev/kmsg', '/proc/1/ns/mnt', '/proc/sys/fs/binfmt_misc/register']:\n\
         \x20   try:\n\
         \x20       data = open(path, 'rb').read(1)\n\
         \x20       print(path, 'worked' if data else 'EMPTY')\n\
         \x20   except OSError as error: print(path, errno.errorcode[error.errno])\n\
         os.makedirs('/tmp/a/b', exist_ok=True)\n\
         inner = os.open('/tmp/a/b', os.O_RDONLY)\n\
         os.rename('/tmp/a/b', '/tmp/b')\n\
         print('moved', os.path.exists('/proc/self/fd/%d/../../../../../..{secret}' % inner) and 'worked' or 'ENOENT')\n"
    );
    refused(&python(&sandbox, &code), &["ENOENT", "EACCES", "EPERM", "ENXIO", "EMPTY", "ENOTDIR"]);
}

fn no_kernel() {
    let scene = Scene::new();
    let sandbox = scene.create();
    let code = "import errno\n\
        for path in ['/proc/sysrq-trigger', '/proc/sys/kernel/core_pattern', '/proc/sys/vm/drop_caches', '/proc/sys/kernel/hostname',\n\
        \x20            '/proc/sys/net/ipv4/ip_forward', '/proc/1/oom_score_adj', '/proc/irq/default_smp_affinity', '/proc/sys/kernel/panic',\n\
        \x20            '/sys/kernel/mm/transparent_hugepage/enabled', '/sys/fs/cgroup/cgroup.procs', '/sys/fs/cgroup/unified/cgroup.procs',\n\
        \x20            '/sys/fs/cgroup/pids/tasks', '/sys/power/state', '/proc/self/uid_map', '/proc/self/setgroups']:\n\
        \x20   try:\n\
        \x20       with open(path, 'w') as file: file.write('0')\n\
        \x20       print(path, 'worked')\n\
        \x20   except OSError as error: print(path, errno.errorcode[error.errno])\n";
    let said = python(&sandbox, code);
    // What is masked is a null device, on which a write works and does nothing.
    let masked = shell(&sandbox, "test ! -e /proc/sysrq-trigger || stat -c %t:%T /proc/sysrq-trigger");
    assert!(masked.is_empty() || masked == "1:3", "{masked}");
    let said = said.replace("/proc/sysrq-trigger worked", "/proc/sysrq-trigger ENOENT");
    refused(&said, &["ENOENT", "EACCES", "EPERM", "EROFS"]);
    assert_eq!(shell(&sandbox, "stat -c %t:%T /proc/interrupts"), "1:3", "it is /dev/null");
    let netlink = "import socket, struct\n\
        s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0))\n\
        s.send(struct.pack('=IHHIIBBHiII', 32, 16, 5, 1, 0, 0, 0, 0, 1, 0, 1))\n\
        kind, = struct.unpack_from('=H', s.recv(4096), 4)\n\
        print('refused' if kind == 2 else 'worked')\n\
        for family in [17, 38, 40]:\n\
        \x20   try: socket.socket(family, socket.SOCK_RAW if family == 17 else socket.SOCK_STREAM); print(family, 'worked')\n\
        \x20   except OSError as error: print(family, 'refused')\n";
    assert_eq!(python(&sandbox, netlink), "refused\n17 refused\n38 refused\n40 refused");
}

fn no_signals() {
    let scene = Scene::new();
    let sandbox = scene.create();
    let ours = std::process::id();
    // A process of the same uid outside: only the namespace is between them.
    let mut outside = std::process::Command::new("sleep").arg("1000").uid_of(ALICE).spawn().unwrap();
    let code = format!(
        "import os, errno\n\
         for pid in [1, {ours}, {}, -1]:\n\
         \x20   try: os.kill(pid, 9 if pid > 0 else 0); print(pid, 'worked')\n\
         \x20   except OSError as error: print(pid, errno.errorcode[error.errno])\n",
        outside.id()
    );
    let said = python(&sandbox, &code);
    refused(&said, &["EPERM", "ESRCH"]);
    assert!(said.starts_with("1 EPERM"), "{said}");
    assert!(outside.try_wait().unwrap().is_none());
    outside.kill().unwrap();
    outside.wait().unwrap();
}

/// `uid` of the standard library under a name of its own, so that the import is where it is used.
trait UidOf {
    fn uid_of(&mut self, uid: u32) -> &mut Self;
}

impl UidOf for std::process::Command {
    fn uid_of(&mut self, uid: u32) -> &mut Self {
        std::os::unix::process::CommandExt::uid(self, uid)
    }
}

fn no_services() {
    let scene = Scene::new();
    // As open as it can be: that it is out of sight is what keeps a tenant away.
    let sockets = tempfile::tempdir().unwrap();
    set_mode(sockets.path(), 0o755);
    let path = sockets.path().join("keeper.sock");
    let listener = UnixListener::bind(&path).unwrap();
    set_mode(&path, 0o666);
    listener.set_nonblocking(true).unwrap();
    let name = format!("nagaya-test-{}", std::process::id());
    let hidden =
        rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&hidden, &rustix::net::SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap())
        .unwrap();
    rustix::net::listen(&hidden, 1).unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let sandbox = scene.create();
    let code = format!(
        "import socket, errno\n\
         def connect(name, family, address):\n\
         \x20   try: socket.socket(family).connect(address); print(name, 'worked')\n\
         \x20   except OSError as error: print(name, errno.errorcode[error.errno])\n\
         connect('path', socket.AF_UNIX, '{}')\n\
         connect('abstract', socket.AF_UNIX, '\\0{name}')\n\
         connect('port', socket.AF_INET, ('127.0.0.1', {}))\n\
         connect('run', socket.AF_UNIX, '/run/nagaya/keeper.sock')\n\
         connect('dbus', socket.AF_UNIX, '/run/dbus/system_bus_socket')\n",
        path.display(),
        port.local_addr().unwrap().port()
    );
    refused(&python(&sandbox, &code), &["ENOENT", "ECONNREFUSED"]);
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

fn no_init() {
    let scene = Scene::new();
    let sandbox = scene.create();
    let code = "import os, errno\n\
        for what in ['/proc/1/status', '/proc/1/root', '/proc/1/exe']:\n\
        \x20   try: os.stat(what); print(what, 'worked')\n\
        \x20   except OSError as error: print(what, errno.errorcode[error.errno])\n\
        for signal in range(1, 65):\n\
        \x20   try: os.kill(1, signal); print(signal, 'worked')\n\
        \x20   except OSError as error: print(signal, errno.errorcode[error.errno])\n";
    refused(&python(&sandbox, code), &["ENOENT", "EPERM", "EACCES"]);
    assert_eq!(shell(&sandbox, "echo it lives"), "it lives");
}

fn descriptors() {
    let scene = Scene::new();
    let sandbox = scene.create();
    let code = "import errno, os, resource\n\
        try: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)); print('raised')\n\
        except ValueError: print('refused')\n\
        opened = []\n\
        try:\n\
        \x20   while len(opened) < 4096: opened.append(os.dup(0))\n\
        except OSError as error: print(errno.errorcode[error.errno], len(opened) + 3)\n";
    assert_eq!(python(&sandbox, code), "refused\nEMFILE 1024");
}

fn binds_of_tenant() {
    let mut scene = Scene::new();
    let bobs = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(bobs.path(), Some(BOB), Some(BOB)).unwrap();
    set_mode(bobs.path(), 0o700);
    fs::create_dir(bobs.path().join("open")).unwrap();
    set_mode(&bobs.path().join("open"), 0o777);
    // Alice points to what is bob's: behind his door, though open inside.
    let homes = tempfile::tempdir().unwrap();
    set_mode(homes.path(), 0o755);
    let link = homes.path().join("link");
    std::os::unix::fs::symlink(bobs.path().join("open"), &link).unwrap();
    let bind = SandboxBind {
        source: link,
        target: "/srv/bobs".into(),
        writable: true,
        as_tenant: true,
        is_optional: false,
    };
    scene.spec.binds.push(bind);
    let refused = launcher().create(&scene.spec).unwrap_err().to_string();
    assert!(refused.contains("Permission denied"), "{refused}");
    set_mode(bobs.path(), 0o755);
    let sandbox = scene.create();
    assert_eq!(shell(&sandbox, "touch /srv/bobs/x && echo made"), "made", "the link is root's");
    // One of her own is not followed, wherever it leads.
    std::os::unix::fs::chown(homes.path(), Some(ALICE), Some(ALICE)).unwrap();
    let refused = launcher().create(&scene.spec).unwrap_err().to_string();
    assert!(refused.contains("a link that is not root's"), "{refused}");
    std::os::unix::fs::chown(homes.path(), Some(0), Some(0)).unwrap();
    // A single file, where there was none.
    fs::write(bobs.path().join("file"), "text").unwrap();
    let source = bobs.path().join("file");
    scene.spec.binds.push(SandboxBind {
        source,
        target: "/run/deep/file".into(),
        writable: false,
        as_tenant: true,
        is_optional: false,
    });
    let sandbox = scene.create();
    assert_eq!(shell(&sandbox, "cat /run/deep/file"), "text");
    let (exit, said) = run(&sandbox, &["sh", "-c", "echo x > /run/deep/file"]);
    assert_ne!(exit.status, Some(0), "{said}");
}

/// A cgroup that is removed with this.
struct Group(std::path::PathBuf);

impl Group {
    fn new(hierarchy: &str) -> Self {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let wanted = if hierarchy == "unified" { "" } else { hierarchy };
        let path = own.lines().find_map(|line| {
            let (names, path) = line.split_once(':')?.1.split_once(':')?;
            (names == wanted).then(|| path.trim_start_matches('/').to_owned())
        });
        let mount =
            if hierarchy == "unified" { v2_mount() } else { format!("/sys/fs/cgroup/{hierarchy}").into() };
        let name = format!("sandbox-test-{}-{:?}", std::process::id(), std::thread::current().id());
        let dir = mount.join(path.unwrap_or_default()).join(name);
        fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    fn processes(&self, file: &str) -> usize {
        fs::read_to_string(self.0.join(file)).unwrap().lines().count()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let until = Instant::now() + TIMEOUT;
        while fs::remove_dir(&self.0).is_err() && Instant::now() < until {
            std::thread::yield_now();
        }
    }
}

fn v2_mount() -> std::path::PathBuf {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let point = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let point = fields.next()?;
        (fields.next()? == "cgroup2").then_some(point)
    });
    point.expect("the harness skips this without cgroup v2").into()
}

const BOMB: &str = "import os, time\n\
    made = 0\n\
    while made < 300:\n\
    \x20   try:\n\
    \x20       if os.fork() == 0: time.sleep(1000)\n\
    \x20       made += 1\n\
    \x20   except OSError: break\n\
    print(made, flush=True)\n\
    time.sleep(1000)\n";

/// Lets a fork bomb loose and returns once it has gone as far as it could.
fn bomb(scene: &Scene) -> (nagaya_keeper::sandbox::Sandbox, u32) {
    let sandbox = scene.create();
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let _task = sandbox
        .run(&SandboxProgram { stdout: Some(write.as_fd()), ..program(&["python3", "-c", BOMB]) })
        .unwrap();
    drop(write);
    scene::wait_readable(&read);
    let mut text = [0; 16];
    let len = rustix::io::read(&read, &mut text).unwrap();
    (sandbox, std::str::from_utf8(&text[..len]).unwrap().trim().parse().unwrap())
}

fn bomb_v1() {
    let group = Group::new("pids");
    fs::write(group.0.join("pids.max"), "20").unwrap();
    let tasks = fs::File::options().write(true).open(group.0.join("tasks")).unwrap();
    let mut scene = Scene::new();
    scene.spec.entrance.tasks.push(Arc::new(tasks.into()));
    let (sandbox, made) = bomb(&scene);
    // The init and the bomb's first process count too.
    assert_eq!((made, group.processes("tasks")), (18, 20));
    drop(sandbox);
}

fn bomb_v2() {
    let group = Group::new("unified");
    let mut scene = Scene::new();
    scene.spec.entrance.born = Some(Arc::new(fs::File::open(&group.0).unwrap().into()));
    let (sandbox, made) = bomb(&scene);
    assert_eq!((made, group.processes("cgroup.procs")), (300, 302), "all of it is born in its cell");
    let groups = shell(&sandbox, "cat /proc/self/cgroup");
    assert!(groups.lines().any(|line| line == "0::/"), "its cell is all it can see: {groups}");
    sandbox.end().unwrap();
    scene::wait_ended(&sandbox);
    assert_eq!(group.processes("cgroup.procs"), 0);
}

fn daemon() {
    let group = Group::new("unified");
    let mut scene = Scene::new();
    scene.spec.entrance.born = Some(Arc::new(fs::File::open(&group.0).unwrap().into()));
    let sandbox = scene.create();
    shell(
        &sandbox,
        "(setsid sh -c 'trap \"\" TERM HUP; (sleep 1000 &) ; sleep 1000' >/dev/null 2>&1 &) ; true",
    );
    let pids: Vec<i32> = fs::read_to_string(group.0.join("cgroup.procs"))
        .unwrap()
        .lines()
        .map(|line| line.parse().unwrap())
        .collect();
    assert!(pids.len() >= 2, "{pids:?}");
    drop(sandbox);
    pids.into_iter().for_each(crate::world::wait_dead);
}

fn ends() {
    let scene = Scene::new();
    let sandbox = scene.create();
    let task = sandbox.run(&program(&["sleep", "1000"])).unwrap();
    assert_eq!(task.try_exit().unwrap(), None);
    task.signal(Signal::TERM).unwrap();
    assert_eq!(task.wait(TIMEOUT).unwrap().signal, Some(Signal::TERM.as_raw()));
    let busy = "x=0; while [ $x -lt 100000 ]; do x=$((x+1)); done; exit 7";
    let exit = sandbox.run(&program(&["sh", "-c", busy])).unwrap().wait(TIMEOUT).unwrap();
    assert_eq!(exit.status, Some(7));
    assert!(exit.cpu_us > 0);
    let left = sandbox.run(&program(&["sleep", "1000"])).unwrap();
    drop(sandbox);
    assert_eq!(left.wait(TIMEOUT).unwrap().signal, Some(Signal::KILL.as_raw()));
    // Killed from outside, as for want of memory: what is asked of it then fails, and does not hang.
    let sandbox = scene.create();
    rustix::process::pidfd_send_signal(sandbox.init_pidfd(), Signal::KILL).unwrap();
    scene::wait_ended(&sandbox);
    assert!(matches!(sandbox.run(&program(&["true"])), Err(SandboxError::Ended(_))));
}

/// Who lets go of it last takes a lock of the whole machine, and a tenant short of CPU time would keep it.
fn taken_apart_by_keeper() {
    let scene = Scene::new();
    let sandbox = scene.create();
    let namespace = shell(&sandbox, "readlink /proc/self/ns/mnt");
    assert!(namespace.starts_with("mnt:["), "{namespace}");
    sandbox.end().unwrap();
    scene::wait_ended(&sandbox);
    assert!(holds(&namespace), "{namespace} went with the sandbox' last process");
    drop(sandbox);
    scene::until("the namespace is let go of", || !holds(&namespace));
}

/// Whether this process has something open with this name.
fn holds(name: &str) -> bool {
    fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .any(|target| target.as_os_str() == name)
}

fn many() {
    let threads: Vec<_> = (0..8)
        .map(|number| {
            std::thread::spawn(move || {
                let scene = Scene::new();
                for _ in 0..5 {
                    let sandbox = scene.create();
                    let said = shell(&sandbox, &format!("echo {number} >> /srv/app/said; echo {number}"));
                    assert_eq!(said, number.to_string());
                }
                assert_eq!(fs::read_to_string(scene.app("said")).unwrap().lines().count(), 5);
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
