//! x
use crate::experiment::Setting;
use anyhow::Result;
pub fn run(_: &Setting) -> Result<()> {
    Ok(())
}
