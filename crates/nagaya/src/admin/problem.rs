//! An error of the admin interface as a problem document (RFC 9457), for both ends of the socket.
//!
//! Not here: the texts of most errors, which come with the error from its origin.

use std::fmt;

use http::StatusCode;
use nagaya_base::Code;
use nagaya_records::RecordMistake;
use nagaya_store::import::{BadLine, ImportError};
use nagaya_store::{StoreError, TransactionError};
use serde::{Deserialize, Serialize};

use super::roles::AdminRole;

pub const CONTENT_TYPE: &str = "application/problem+json";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProblemReply {
    pub status: u16,
    /// `NGYnnnn`, for `nagaya error`.
    pub code: String,
    pub title: String,
    pub detail: String,
    /// For a refused change: each wrong field.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mistakes: Vec<RecordMistake>,
    /// For a refused import: the first bad lines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lines: Vec<BadLine>,
    /// For a refused import: the number of all bad lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bad_lines: Option<u64>,
}

impl ProblemReply {
    fn new(status: StatusCode, code: Code, title: &str, detail: impl fmt::Display) -> Box<Self> {
        Box::new(Self {
            status: status.as_u16(),
            code: code.to_string(),
            title: title.into(),
            detail: detail.to_string(),
            mistakes: Vec::new(),
            lines: Vec::new(),
            bad_lines: None,
        })
    }

    /// The request itself cannot be understood.
    pub fn request(status: StatusCode, detail: impl fmt::Display) -> Box<Self> {
        Self::new(status, Code(220), "The request was not understood", detail)
    }

    /// The other end does not have the role of the route.
    pub fn forbidden(role: Option<AdminRole>, needed: AdminRole) -> Box<Self> {
        let has = role.map_or_else(|| "no role".to_owned(), |role| format!("the role '{role}'"));
        let detail = format!(
            "this needs the role '{needed}' and you have {has}: [admin] of the node's configuration names who has which"
        );
        Self::new(StatusCode::FORBIDDEN, Code(530), "Not allowed", detail)
    }

    pub fn not_found(kind: &str, name: &str) -> Box<Self> {
        let detail = format!("there is no {kind} '{name}': `nagaya {kind} list` shows those there are");
        Self::new(StatusCode::NOT_FOUND, Code(211), "No such record", detail)
    }

    /// A rule that cannot be evaluated.
    pub fn broken_rule(code: Code, detail: impl fmt::Display) -> Box<Self> {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, code, "The rule was refused", detail)
    }

    pub fn exists(kind: &str, name: &str) -> Box<Self> {
        let detail = format!("{kind} '{name}' exists already: change it with `nagaya {kind} set`");
        Self::new(StatusCode::PRECONDITION_FAILED, Code(215), "The record exists", detail)
    }

    pub fn outdated(expected: u64, found: u64) -> Box<Self> {
        let detail = format!(
            "the records changed meanwhile (revision {found}, not {expected}): read them again and repeat the change"
        );
        Self::new(StatusCode::PRECONDITION_FAILED, Code(216), "The records changed meanwhile", detail)
    }

    /// A process of the node does not reply, for example while it is restarted.
    pub fn silent(process: &str) -> Box<Self> {
        let detail = format!("the {process} process did not answer: `nagaya status` shows whether it runs");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, Code(510), "A process did not answer", detail)
    }

    /// The receipt is missing. `kept` is how many receipts the edge has, if it said so.
    pub fn no_receipt(id: &str, kept: Option<u64>) -> Box<Self> {
        let kept = kept.map_or_else(String::new, |kept| format!(" among the {kept} that are kept"));
        let detail =
            format!("there is no receipt of request '{id}'{kept}: older requests are only in the access log");
        Self::new(StatusCode::NOT_FOUND, Code(511), "No such receipt", detail)
    }

    /// The keeper's own text about its refusal for an instance.
    pub fn instance(status: StatusCode, code: Code, detail: &str) -> Box<Self> {
        Self::new(status, code, "The instance is as it was", detail)
    }

    /// A refusal or failure of a cluster.
    pub fn cluster(status: StatusCode, code: Code, detail: impl fmt::Display) -> Box<Self> {
        Self::new(status, code, "The cluster is as it was", detail)
    }

    pub fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }
}

impl fmt::Display for ProblemReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl From<StoreError> for Box<ProblemReply> {
    fn from(error: StoreError) -> Self {
        let status = match error {
            StoreError::NoUid { .. } => StatusCode::CONFLICT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        ProblemReply::new(status, error.code(), "The store failed", error)
    }
}

impl From<TransactionError> for Box<ProblemReply> {
    fn from(error: TransactionError) -> Self {
        let code = error.code();
        let detail = error.to_string();
        match error {
            TransactionError::Store(error) => error.into(),
            TransactionError::Refused(mistakes) => {
                let title = "The change was refused";
                Box::new(ProblemReply {
                    mistakes,
                    ..*ProblemReply::new(StatusCode::UNPROCESSABLE_ENTITY, code, title, detail)
                })
            }
        }
    }
}

impl From<ImportError> for Box<ProblemReply> {
    fn from(error: ImportError) -> Self {
        let code = error.code();
        let detail = error.to_string();
        let title = "The import was refused";
        match error {
            ImportError::Store(error) => error.into(),
            ImportError::Read(_) => ProblemReply::new(StatusCode::BAD_REQUEST, code, title, detail),
            ImportError::TooLong { .. } => {
                ProblemReply::new(StatusCode::PAYLOAD_TOO_LARGE, code, title, detail)
            }
            ImportError::Refused { named, count } => Box::new(ProblemReply {
                lines: named,
                bad_lines: Some(count),
                ..*ProblemReply::new(StatusCode::UNPROCESSABLE_ENTITY, code, title, detail)
            }),
        }
    }
}
