//! `nagaya completion SHELL` and `nagaya man`: the command line in the form for shells and manuals.
//!
//! Both are made from the same definitions as `--help`. Not here: those definitions (`cli`).

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;
use clap_mangen::Man;

use super::output::{self, CliError};

#[derive(Debug, Args)]
pub struct CompletionArgs {
    /// Name of the shell
    shell: Shell,
}

#[derive(Debug, Args)]
pub struct ManualArgs {
    /// Write a page for each command into this directory, instead of printing the first one
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub fn complete(
    mut command: clap::Command,
    CompletionArgs { shell }: &CompletionArgs,
) -> Result<ExitCode, CliError> {
    let mut script = Vec::new();
    clap_complete::generate(*shell, &mut command, "nagaya", &mut script);
    print(script)
}

pub fn manual(command: clap::Command, ManualArgs { dir }: ManualArgs) -> Result<ExitCode, CliError> {
    let Some(dir) = dir else {
        let mut page = Vec::new();
        Man::new(command).render(&mut page).map_err(CliError::Output)?;
        return print(page);
    };
    match clap_mangen::generate_to(command, &dir) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => Err(CliError::Io { path: dir, error }),
    }
}

fn print(text: Vec<u8>) -> Result<ExitCode, CliError> {
    output::print(String::from_utf8_lossy(&text).trim_end())?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use clap::CommandFactory as _;

    use super::super::NagayaArgs;
    use super::*;

    #[test]
    fn bash_takes_the_script_and_completes_commands() {
        let mut script = Vec::new();
        clap_complete::generate(Shell::Bash, &mut NagayaArgs::command(), "nagaya", &mut script);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), script).unwrap();
        let words = r#". "$1"; complete -p nagaya; COMP_WORDS=(nagaya che) COMP_CWORD=1; _nagaya nagaya che nagaya; echo "${COMPREPLY[@]}""#;
        let shell = Command::new("bash").args(["-ec", words, "bash"]).arg(file.path()).output().unwrap();
        let said = String::from_utf8_lossy(&shell.stdout);
        assert!(shell.status.success(), "{}", String::from_utf8_lossy(&shell.stderr));
        assert!(said.trim_end().ends_with("nagaya\ncheck-config"), "{said}");
    }

    #[test]
    fn each_command_has_a_manual_page_and_no_hidden_one_has() {
        let dir = tempfile::tempdir().unwrap();
        manual(NagayaArgs::command(), ManualArgs { dir: Some(dir.path().into()) }).unwrap();
        let page = |name: &str| std::fs::read_to_string(dir.path().join(name));
        for (name, expected) in [
            ("nagaya.1", "web hosting engine"),
            ("nagaya-site-add.1", "\\-\\-host"),
            ("nagaya-top.1", "Examples"),
        ] {
            let page = page(name).unwrap();
            assert!(page.starts_with(".") && page.contains(expected), "{name}: {page}");
        }
        for hidden in ["nagaya-edge.1", "nagaya-keeper.1", "nagaya-rule-check.1", "nagaya-rule-try.1"] {
            assert!(page(hidden).is_err(), "{hidden}");
        }
        let nowhere = dir.path().join("nowhere");
        let failed = manual(NagayaArgs::command(), ManualArgs { dir: Some(nowhere.clone()) });
        assert!(matches!(failed, Err(CliError::Io { path, .. }) if path == nowhere));
    }
}
