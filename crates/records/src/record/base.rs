//! The root directory that an application sees: a directory of the node, or an image in an OCI
//! image layout.
//!
//! Not here: unpacking one (`keeper::bases`), checks of the record (`check::app`).

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Prefix of the path of a layout.
const LAYOUT: &str = "oci:";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum BaseRecord {
    Directory(PathBuf),
    /// `oci:PATH` or `oci:PATH:TAG`. Without a tag, the layout has only one image.
    Layout {
        path: PathBuf,
        tag: Option<String>,
    },
}

impl BaseRecord {
    /// Returns the path on the node.
    pub fn path(&self) -> &Path {
        match self {
            Self::Directory(path) | Self::Layout { path, .. } => path,
        }
    }
}

impl From<String> for BaseRecord {
    fn from(text: String) -> Self {
        let Some(layout) = text.strip_prefix(LAYOUT) else { return Self::Directory(text.into()) };
        // A tag has no slash; text before a slash belongs to the path.
        match layout.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')) {
            Some((path, tag)) => Self::Layout { path: path.into(), tag: Some(tag.into()) },
            None => Self::Layout { path: layout.into(), tag: None },
        }
    }
}

impl From<BaseRecord> for String {
    fn from(base: BaseRecord) -> Self {
        base.to_string()
    }
}

impl fmt::Display for BaseRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::Layout { path, tag: None } => write!(f, "{LAYOUT}{}", path.display()),
            Self::Layout { path, tag: Some(tag) } => write!(f, "{LAYOUT}{}:{tag}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_is_a_directory_or_a_layout_with_or_without_a_tag() {
        let layout = |path: &str, tag: Option<&str>| BaseRecord::Layout {
            path: path.into(),
            tag: tag.map(Into::into),
        };
        for (text, base) in [
            ("/srv/base", BaseRecord::Directory("/srv/base".into())),
            ("/srv/a:b", BaseRecord::Directory("/srv/a:b".into())),
            ("oci:/srv/app", layout("/srv/app", None)),
            ("oci:/srv/app:v1.2", layout("/srv/app", Some("v1.2"))),
            ("oci:/srv/a:b/app", layout("/srv/a:b/app", None)),
            ("oci:/srv/app:", layout("/srv/app", Some(""))),
        ] {
            assert_eq!(BaseRecord::from(text.to_owned()), base);
            assert_eq!(String::from(base), text);
        }
    }
}
