<?php
// The demo's wiki: everybody may edit, nobody has to log in.
$conf['title'] = 'A wiki on nagaya';
$conf['tagline'] = 'DokuWiki, as Debian packages it';
$conf['savedir'] = './data';
$conf['license'] = 'cc0';
$conf['useacl'] = 1;
$conf['superuser'] = '@admin';
$conf['disableactions'] = 'register,resendpwd';
$conf['updatecheck'] = 0;
$conf['userewrite'] = 0;
$conf['youarehere'] = 1;
