//! Writes the configuration that the first process of a guest reads (`c/guest_init.c`).
//!
//! One statement in each line: words with one space between them. Any other byte than a letter, a
//! digit and a few signs is written as `%XX`. So no value can begin another statement.
//!
//! Not here: the initial RAM disk that carries it (`initramfs`).

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::settings::{ForwardedPlace, GuestApplication, GuestListen, MachineSettings};

/// Address of the sandbox's loopback in QEMU's own network, and of the first port that is forwarded
/// there (`ForwardedPlace`).
pub const FORWARD_PORT_MIN: u16 = 20_000;

/// Files in memory of a guest: `/run`, MiB.
const RUN_MIB: u32 = 16;

/// Returns the configuration of these settings. The variables are `NAME=VALUE`.
pub fn render(settings: &MachineSettings, variables: &[Vec<u8>]) -> String {
    let mut out = String::new();
    let mut say = |what: &str, words: &[&[u8]]| push_statement(&mut out, what, words);
    say("files", &[]);
    say("memory", &[b"/run", RUN_MIB.to_string().as_bytes()]);
    say("hostname", &[settings.name.as_bytes()]);
    let GuestApplication { command, uid, gid, open_files_max, directory, listen, places } =
        &settings.application;
    let [uid, gid, files] =
        [(*uid).into(), (*gid).into(), *open_files_max].map(|number: u64| number.to_string());
    say("user", &[uid.as_bytes(), gid.as_bytes(), files.as_bytes()]);
    say("directory", &[directory.as_os_str().as_bytes()]);
    for argument in command {
        say("argument", &[argument.as_bytes()]);
    }
    for variable in variables {
        say("variable", &[variable]);
    }
    match listen {
        GuestListen::Port(port) => say("listen", &[b"port", port.to_string().as_bytes()]),
        GuestListen::Path(path) => say("listen", &[b"path", path.as_os_str().as_bytes()]),
        GuestListen::Socket => say("listen", &[b"socket"]),
    }
    for (place, port) in places.iter().zip(FORWARD_PORT_MIN..) {
        let port = port.to_string();
        match place {
            ForwardedPlace::Address(address) => {
                let (ip, own) = (address.ip().to_string(), address.port().to_string());
                say("forward", &[b"address", ip.as_bytes(), own.as_bytes(), port.as_bytes()]);
            }
            ForwardedPlace::Path(path) => {
                say("forward", &[b"path", path.as_os_str().as_bytes(), port.as_bytes()]);
            }
        }
    }
    out
}

/// Returns the order to run a command beside the application. A terminal has so many rows and
/// columns.
pub fn render_command(
    command: &[OsString],
    directory: &Path,
    variables: &[Vec<u8>],
    terminal: Option<(u16, u16)>,
) -> String {
    let mut out = String::new();
    let mut say = |what: &str, words: &[&[u8]]| push_statement(&mut out, what, words);
    say("directory", &[directory.as_os_str().as_bytes()]);
    for argument in command {
        say("argument", &[argument.as_bytes()]);
    }
    for variable in variables {
        say("variable", &[variable]);
    }
    if let Some((rows, columns)) = terminal {
        say("terminal", &[rows.to_string().as_bytes(), columns.to_string().as_bytes()]);
    }
    out
}

fn push_statement(out: &mut String, what: &str, words: &[&[u8]]) {
    out.push_str(what);
    for word in words {
        out.push(' ');
        push_word(out, word);
    }
    out.push('\n');
}

fn push_word(out: &mut String, word: &[u8]) {
    for &byte in word {
        match byte {
            b'a'..=b'z'
            | b'A'..=b'Z'
            | b'0'..=b'9'
            | b'.'
            | b'/'
            | b'_'
            | b'-'
            | b'='
            | b':'
            | b','
            | b'@'
            | b'+' => {
                out.push(char::from(byte));
            }
            _ => write!(out, "%{byte:02x}").expect("a string takes everything"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Accelerator, ImageContent, MachineHardware, MachineOrigin, QemuProgram};

    fn settings() -> MachineSettings {
        MachineSettings {
            name: "blog".into(),
            qemu: QemuProgram {
                words: vec!["qemu-system-x86_64".into()],
                library: "/l".into(),
                modules: None,
            },
            hardware: MachineHardware {
                accelerator: Accelerator::Tcg,
                memory_mib: 96,
                vcpus: 1,
                tsc_khz: Some(2_100_000),
            },
            origin: MachineOrigin::Kernel { kernel: "/k".into(), initramfs: "/i".into() },
            image: ImageContent::Process,
            root: "/".into(),
            application: GuestApplication {
                command: vec!["./app".into(), "a b\n%".into()],
                uid: 10_001,
                gid: 10_002,
                open_files_max: 4096,
                directory: "/srv/alice/blog".into(),
                listen: GuestListen::Port(8080),
                places: vec![
                    ForwardedPlace::Address("127.0.0.1:5432".parse().unwrap()),
                    ForwardedPlace::Path("/run/mysqld/mysqld.sock".into()),
                ],
            },
            port: 8080,
            exec_port: 8081,
        }
    }

    #[test]
    fn each_value_is_one_word_of_its_statement() {
        let variables = [b"KEY=a\nargument x".to_vec()];
        let text = render(&settings(), &variables);
        let expected = "files
memory /run 16
hostname blog
user 10001 10002 4096
directory /srv/alice/blog
argument ./app
argument a%20b%0a%25
variable KEY=a%0aargument%20x
listen port 8080
forward address 127.0.0.1 5432 20000
forward path /run/mysqld/mysqld.sock 20001
";
        assert_eq!(text, expected);
    }
}
