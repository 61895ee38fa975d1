//! Why a request has no cell.
//!
//! Not here: what went wrong with one file (`files`).

use nagaya_base::Code;
use nagaya_keeper_api::protocol::FailureKind;

use crate::fault::Fault;

use super::codes;
use super::files::CgroupFileError;

/// Why a request has no cell.
#[derive(Debug, thiserror::Error)]
#[error("{code}: {message}")]
pub struct CellError {
    pub code: Code,
    pub message: String,
}

impl From<CgroupFileError> for CellError {
    fn from(error: CgroupFileError) -> Self {
        Self { code: codes::MAKE, message: format!("cannot make a cell: {error}") }
    }
}

impl From<CellError> for Fault {
    fn from(CellError { code, message }: CellError) -> Self {
        Self { failure: FailureKind::Broken, code, message }
    }
}
