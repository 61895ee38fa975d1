//! System calls of CGI programs and PHP workers: what is refused, and that usual software works behind the filter.
//!
//! Not here: the list itself (unit tests of `sandbox::filter`), applications' (`sandbox`).

use nagaya_keeper::ProgramCalls;

use crate::Fact;
use crate::enclosure::said_by;
use crate::php::{Php, with_sites};
use crate::world::World;

pub const ROOT: &[Fact] = &[
    ("a CGI program cannot make namespaces, mount, trace, or use odd corners of the kernel", cgi_is_refused),
    ("a PHP script and what it starts cannot do so either", php_is_refused),
    ("a CGI program of 32 bits is ended", other_bits_are_refused),
    ("programs ask the kernel for all that their rights let them where that is configured", all_is_allowed),
    ("usual software works as a CGI program", software_works),
];

/// Makes each call by its number, and prints how it ended. What the kernel itself refuses to everybody without rights is
/// among them, too.
const CALLS: &str = r#"
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
is_x86 = os.uname().machine == 'x86_64'
room = ctypes.create_string_buffer(256)
USER, FLAGS = 0x10000000, 0x10000000 | 17
calls = [
    ('unshare', (272, 97), (USER,)), ('clone', (56, 220), (FLAGS, 0, 0, 0, 0)), ('clone3', (435, 435), (room, 88)),
    ('setns', (308, 268), (0, 0)), ('mount', (165, 40), (b'none', b'/tmp', b'tmpfs', 0, None)),
    ('umount2', (166, 39), (b'/tmp', 2)), ('pivot_root', (155, 41), (b'/tmp', b'/tmp')),
    ('chroot', (161, 51), (b'/tmp',)), ('open_tree', (428, 428), (-100, b'/', 1)),
    ('move_mount', (429, 429), (-1, b'', -100, b'/tmp', 4)), ('fsopen', (430, 430), (b'tmpfs', 0)),
    ('mount_setattr', (442, 442), (-100, b'/tmp', 0, room, 32)), ('bpf', (321, 280), (0, room, 72)),
    ('perf_event_open', (298, 241), (room, 0, -1, -1, 0)), ('userfaultfd', (323, 282), (1,)),
    ('io_uring_setup', (425, 425), (4, room)), ('io_uring_enter', (426, 426), (0, 0, 0, 0, None, 0)),
    ('io_uring_register', (427, 427), (0, 0, None, 0)), ('add_key', (248, 217), (b'user', b'n', b'x', 1, -2)),
    ('request_key', (249, 218), (b'user', b'n', None, -2)), ('keyctl', (250, 219), (0, -2, 1)),
    ('ptrace', (101, 117), (0, 0, 0, 0)), ('process_vm_readv', (310, 270), (os.getppid(), room, 1, room, 1, 0)),
    ('pidfd_getfd', (438, 438), (0, 0, 0)), ('kcmp', (312, 272), (os.getpid(), os.getpid(), 0, 0, 0)),
    ('kexec_load', (246, 104), (0, 0, None, 0)), ('kexec_file_load', (320, 294), (0, 0, 0, None, 0)),
    ('init_module', (175, 105), (room, 1, b'')), ('finit_module', (313, 273), (0, b'', 0)),
    ('delete_module', (176, 106), (b'x', 0)), ('open_by_handle_at', (304, 265), (0, room, 0)),
    ('fanotify_init', (300, 262), (0x200, 0)), ('swapon', (167, 224), (b'/tmp/x', 0)),
    ('reboot', (169, 142), (0, 0, 0, None)), ('syslog', (103, 116), (3, room, 10)),
]
if is_x86: calls.append(('x32', (0x40000000 + 39, 0), ()))
for name, numbers, args in calls:
    result = libc.syscall(numbers[0 if is_x86 else 1], *args)
    if name == 'clone' and result == 0: os._exit(0)
    print(name, 'worked' if result >= 0 else errno.errorcode[ctypes.get_errno()], flush=True)
"#;

/// Those of them that a program without rights could make, on every kernel.
const OTHERWISE_ALLOWED: [&str; 3] = ["keyctl", "kcmp", "ptrace"];

fn calls_of(said: &str) -> Vec<(&str, &str)> {
    said.lines().filter_map(|line| line.split_once(' ')).collect()
}

#[track_caller]
fn assert_refused(said: &str) {
    let calls = calls_of(said);
    assert!(calls.len() >= 35, "{said}");
    for (name, how) in calls {
        let is_missing = matches!(name, "clone3" | "x32") || name.starts_with("io_uring");
        assert_eq!(how, if is_missing { "ENOSYS" } else { "EPERM" }, "{name}");
    }
}

fn program(text: &str) -> String {
    format!("exec python3 - <<'THE_END'\n{text}\nTHE_END\n")
}

fn cgi_is_refused() {
    let world = World::new().with_cgi(&program(CALLS)).start();
    world.run(async |keeper| assert_refused(&said_by(&keeper, "cgi").await));
}

fn php_is_refused() {
    let world = World::new();
    let calls = world.script("calls.py", CALLS);
    let status = world.script("status.php", "<?php echo file_get_contents('/proc/self/status');");
    let run = format!("<?php passthru('python3 {}');", calls.display());
    let run = world.script("run.php", &run);
    let world = with_sites(world).start();
    world.run(async |keeper| {
        let mut php = Php::start_for(&keeper, "php").await;
        let status = php.ask(&status, "").await;
        let line = |name: &str| status.lines().find(|line| line.starts_with(name)).map(str::to_owned);
        assert_eq!(line("Seccomp:").as_deref(), Some("Seccomp:\t2"), "{status}");
        assert_eq!(line("NoNewPrivs:").as_deref(), Some("NoNewPrivs:\t1"), "{status}");
        assert_refused(&php.ask(&run, "").await);
    });
}

/// Asks for its number as programs of 32 bits do: `mov eax, 20; int 0x80; ret`.
const OTHER_BITS: &str = r"
import ctypes, mmap, os
page = mmap.mmap(-1, 4096, prot=7)
page.write(b'\xb8\x14\x00\x00\x00\xcd\x80\xc3')
ask = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
pid = os.fork()
if pid == 0: os._exit(0 if ask() > 0 else 1)
print('signal', os.WTERMSIG(os.waitpid(pid, 0)[1]))
";

fn other_bits_are_refused() {
    if !cfg!(target_arch = "x86_64") {
        return;
    }
    let world = World::new().with_cgi(&program(OTHER_BITS)).start();
    world.run(async |keeper| {
        let expected = format!("signal {}\n", rustix::process::Signal::SYS.as_raw());
        assert_eq!(said_by(&keeper, "cgi").await, expected);
    });
}

fn all_is_allowed() {
    let world = World::new()
        .with(|options| options.programs.system_calls = ProgramCalls::All)
        .with_cgi(&program(CALLS))
        .start();
    world.run(async |keeper| {
        let said = said_by(&keeper, "cgi").await;
        let calls = calls_of(&said);
        for name in OTHERWISE_ALLOWED {
            assert!(calls.contains(&(name, "worked")), "{name}: {said}");
        }
    });
}

/// Each line is a program, and what it says. Those that are not installed are left out, but for the first three.
const SOFTWARE: [(&str, &str); 8] = [
    ("sh", "(echo shell | cat) && sleep 0 & wait; :"),
    ("perl", "perl -e 'my $p = fork // die; if (!$p) { exit 0 } waitpid $p, 0; print \"perl $?\\n\"'"),
    (
        "python3",
        "python3 -c 'import threading, subprocess, socket, tempfile, mmap\nt = threading.Thread(target=print, args=(\"python\",)); t.start(); t.join()\nsubprocess.run([\"true\"], check=True); socket.socketpair(); tempfile.TemporaryFile().write(b\"x\"); mmap.mmap(-1, 10)'",
    ),
    ("php", "php -r 'echo \"php \", shell_exec(\"echo of a shell\");'"),
    (
        "git",
        "cd /tmp && rm -rf r && git init -q r && cd r && echo x > f && git add f && git -c user.name=a -c user.email=a@b commit -qm c && git log --format=git-%s",
    ),
    ("node", "node -e 'require(\"fs\").readFile(\"/etc/passwd\", e => console.log(\"node\", e))'"),
    ("convert", "convert -size 8x8 xc:red png:- | head -c 4 | tail -c 3; echo"),
    ("sqlite3", "sqlite3 /tmp/s.db 'create table if not exists t(x); select count(*) > -1 from t'"),
];

fn software_works() {
    let script: String = SOFTWARE
        .iter()
        .map(|(name, text)| {
            format!("if command -v {name} >/dev/null; then ( {text}\n) 2>&1; echo \"{name}: $?\"; fi\n")
        })
        .collect();
    let world = World::new().with_cgi(&script).start();
    world.run(async |keeper| {
        let said = said_by(&keeper, "cgi").await;
        for (name, _) in &SOFTWARE[..3] {
            assert!(said.contains(&format!("{name}: 0\n")), "{said}");
        }
        for expected in ["shell\n", "perl 0\n", "python\n"] {
            assert!(said.contains(expected), "{said}");
        }
        let statuses = said
            .lines()
            .filter(|line| SOFTWARE.iter().any(|(name, _)| line.starts_with(&format!("{name}: "))));
        for line in statuses {
            assert!(line.ends_with(": 0"), "{said}");
        }
    });
}
