//! What an application sees as `/`: a directory of the node, or an image in an OCI image layout.
//!
//! Not here: unpacking one (`keeper::bases`), checks of the record (`check::app`).

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Before the path of a layout.
const LAYOUT: &str = "oci:";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Base {
    Directory(PathBuf),
    /// `oci:PATH` or `oci:PATH:TAG`. Without a tag it has one image only.
    Layout {
        path: PathBuf,
        tag: Option<String>,
    },
}

impl Base {
    /// On the node.
    pub fn path(&self) -> &Path {
        match self {
            Self::Directory(path) | Self::Layout { path, .. } => path,
        }
    }
}

impl From<String> for Base {
    fn from(text: String) -> Self {
        let Some(layout) = text.strip_prefix(LAYOUT) else { return Self::Directory(text.into()) };
        // A tag has no slash, and what comes before one is of the path.
        match layout.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')) {
            Some((path, tag)) => Self::Layout { path: path.into(), tag: Some(tag.into()) },
            None => Self::Layout { path: layout.into(), tag: None },
        }
    }
}

impl From<Base> for String {
    fn from(base: Base) -> Self {
        base.to_string()
    }
}

impl fmt::Display for Base {
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
        let layout =
            |path: &str, tag: Option<&str>| Base::Layout { path: path.into(), tag: tag.map(Into::into) };
        for (text, base) in [
            ("/srv/base", Base::Directory("/srv/base".into())),
            ("/srv/a:b", Base::Directory("/srv/a:b".into())),
            ("oci:/srv/app", layout("/srv/app", None)),
            ("oci:/srv/app:v1.2", layout("/srv/app", Some("v1.2"))),
            ("oci:/srv/a:b/app", layout("/srv/a:b/app", None)),
            ("oci:/srv/app:", layout("/srv/app", Some(""))),
        ] {
            assert_eq!(Base::from(text.to_owned()), base);
            assert_eq!(String::from(base), text);
        }
    }
}
